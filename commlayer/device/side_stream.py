"""Work on another stream: ordered after the current one, with what it reads kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from commlayer.device.device import DeviceRuntime
from commlayer.device.foreign import leaves
from commlayer.errors import CommError, ErrorKind

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested containers (see `leaves`), in order.

    Raises `CommError` (CONFIG) for an object that may hide some.
    """
    tensors = []
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif not isinstance(leaf, _PLAIN):
            raise CommError(
                ErrorKind.CONFIG,
                "side_stream",
                f"`uses` has a {type(leaf).__qualname__}, which may hold tensors that are not seen",
                "List its tensors",
            )
    return tensors


class SideStreams:
    """The side streams of one communicator, each used by one block of one thread at a time.

    `hold(event, tensors)` keeps host tensors until a device event.  `check`
    watches every torch operation inside.
    """

    def __init__(
        self,
        device: DeviceRuntime | None,
        hold: Callable[[Any, Any], object],
        *,
        check: bool,
    ) -> None:
        self._device = device
        self._hold = hold
        self._check = check
        self._idle: list[Any] = []

    @contextmanager
    def enter(self, uses: Any) -> Iterator[None]:
        """Make a side stream current; see `Communicator.side_stream`."""
        tensors = tensors_in(uses)
        device = self._device
        if device is None:
            yield
            return
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = device.stream()
        resident = [tensor for tensor in tensors if device.holds(tensor)]
        hosted = [tensor for tensor in tensors if not device.holds(tensor)]
        ready = device.event()
        ready.record(device.current_stream())
        try:
            with stream:
                ready.wait(stream)
                for tensor in resident:
                    device.record_stream(tensor, stream)
                try:
                    with (
                        UnlistedTensors(device, stream, resident) if self._check else nullcontext()
                    ):
                        yield
                finally:
                    if hosted:
                        done = device.event()
                        done.record(stream)
                        self._hold(done, hosted)
        finally:
            self._idle.append(stream)


class UnlistedTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises (LIFETIME) at the first operation on `stream` that uses memory nobody retains for it.

    Retained are the memory of `listed`, what operations on the stream made, and
    what was recorded on a stream by `Tensor.record_stream`, as the results of
    handles are that were waited.  Views use no memory.  Seen is what goes
    through torch's dispatcher on the calling thread; what a transport reads is
    retained by the ledger.
    """

    def __init__(self, device: DeviceRuntime, stream: Any, listed: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._stream = stream
        self._retained = weakref.WeakSet(tensor.untyped_storage() for tensor in listed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" or self._device.current_stream() != self._stream:
            return func(*args, **kwargs)
        given = self._resident((args, kwargs))
        if func is torch.ops.aten.record_stream.default:
            self._retained.update(tensor.untyped_storage() for tensor in given)
        elif not _is_view(func):
            for tensor in given:
                if tensor.untyped_storage() not in self._retained:
                    raise _unlisted(tensor, func)
        result = func(*args, **kwargs)
        if not _is_view(func):
            self._retained.update(tensor.untyped_storage() for tensor in self._resident(result))
        return result

    def _resident(self, values: Any) -> list[Tensor]:
        return [
            leaf
            for leaf in tree_leaves(values)
            if isinstance(leaf, Tensor) and self._device.holds(leaf)
        ]


@cache
def _is_view(func: Any) -> bool:
    """Whether `func` returns other views of its arguments' memory, which it does not touch."""
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _unlisted(tensor: Tensor, func: Any) -> CommError:
    return CommError(
        ErrorKind.LIFETIME,
        "side_stream",
        f"{func} uses a {tensor.dtype} tensor of shape {list(tensor.shape)} that was made outside "
        "and is not in `uses`: its memory may be handed out again while the side stream reads it",
        "List it in `uses`",
    )
