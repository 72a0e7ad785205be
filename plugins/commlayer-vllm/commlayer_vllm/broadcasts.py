"""The broadcasts of sampled and draft tokens, from the last stage to all others.

The engine's methods stay as they are.  Each runs with a ``torch`` in which
``torch.distributed.broadcast`` is commlayer's: which tokens are sent, when, of
what shape, and which steps are skipped is still the engine's decision, and one
that differs between two ranks raises instead of hanging.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from commlayer.communicator import Communicator
from commlayer.handle import Handle
from commlayer_vllm.seams import BroadcastSeam
from commlayer_vllm.settings import Settings

Broadcast = Callable[..., "Handle | None"]


class TokenBroadcasts:
    """Broadcasts over the communicator of the pipeline group, and installs them.

    `counts` is told of each, by its channel.
    """

    def __init__(
        self, group: Any, comm: Communicator, settings: Settings, counts: Counter[str]
    ) -> None:
        self._group = group
        self._comm = comm
        self._counts = counts
        self._at_most = _largest(settings)
        self._originals: list[tuple[type, str, Any]] = []

    def install(self, seams: list[tuple[type, BroadcastSeam]]) -> None:
        """Replace the methods of `seams` in their classes."""
        for owner, seam in seams:
            original = vars(owner)[seam.name]
            self._originals.append((owner, seam.name, original))
            setattr(owner, seam.name, self._bound(original, seam.channels))

    def uninstall(self) -> None:
        """Put the engine's methods back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def broadcast(self, channel: str, tensor: Tensor, src: int, async_op: bool) -> Handle | None:
        """As ``torch.distributed.broadcast`` on the pipeline group; `src` is a global rank.

        The source may be overwritten at once, and its rank waits for nobody.
        """
        root = self._group.ranks.index(src)
        comm = self._comm.channel(channel)
        sending = root == comm.rank
        self._counts[f"{channel} {'sent' if sending else 'received'}"] += 1
        handle: Handle = comm.broadcast(
            tensor.clone() if sending else tensor,
            root,
            async_op=True,
            at_most=self._at_most.get(channel),
        )
        if async_op:
            return handle
        if not sending:
            handle.wait()
        return None

    def _bound(self, original: FunctionType, channels: tuple[str, ...]) -> Any:
        """`original` with commlayer's broadcast; its calls take `channels` in turn."""
        remaining: list[str] = []

        def broadcast(
            tensor: Tensor, src: int, group: Any = None, async_op: bool = False
        ) -> Handle | None:
            return self.broadcast(remaining.pop(0), tensor, src, async_op)

        inner = with_broadcast(original, broadcast)

        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            remaining[:] = channels
            return inner(*arguments, **named)

        return call


def with_broadcast(function: FunctionType, broadcast: Broadcast) -> FunctionType:
    """A twin of `function` for which ``torch.distributed.broadcast`` is `broadcast`."""
    distributed = _Replacing(torch.distributed, broadcast=broadcast)
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, "torch": _Replacing(torch, distributed=distributed)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


class _Replacing:
    """A module, but for some names."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _largest(settings: Settings) -> dict[str, int]:
    """The largest broadcast of each channel in bytes, which lets a device receive ahead."""
    rows, drafts = settings.max_sequences, settings.draft_tokens
    if not rows:
        return {}
    sizes = {"tokens": rows * (drafts + 1) * 8, "counts": 2 * rows * 4, "drafts": rows * drafts * 8}
    return {channel: size for channel, size in sizes.items() if size}
