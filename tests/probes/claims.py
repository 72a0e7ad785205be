"""Backends over gloo that declare something else than they do, or do something else than gloo.

A module of its own, because the processes of a probe import it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch.distributed as dist
from commlayer_gloo import SEMANTICS, GlooBackend, GlooEndpoint
from torch import Tensor

from commlayer.backend import Endpoint, Transport, World
from commlayer.semantics import DroppedWork, PeerLoss, Poll, Semantics, SizeMismatch, Threads


def declaring(**p2p: Any) -> Semantics:
    """The facts of gloo, but for some."""
    return msgspec.structs.replace(SEMANTICS, p2p=msgspec.structs.replace(SEMANTICS.p2p, **p2p))


class Boastful(GlooBackend):
    """Declares more than gloo does."""

    name: ClassVar[str] = "boastful"
    semantics: ClassVar[Semantics] = declaring(
        poll=Poll.EXACT,
        wait_repeatable=True,
        dropped_work=DroppedWork.CONTINUES,
        eager_bytes=64,
        size_mismatch=SizeMismatch.ERROR,
        peer_loss=PeerLoss.RAISES,
    )


class Modest(GlooBackend):
    """Declares next to nothing: almost every fact has its weakest value."""

    name: ClassVar[str] = "modest"
    semantics: ClassVar[Semantics] = Semantics(threads=Threads.SERIALIZED)


class Funneled(GlooBackend):
    """Wants to be called from one thread only."""

    name: ClassVar[str] = "funneled"
    semantics: ClassVar[Semantics] = msgspec.structs.replace(SEMANTICS, threads=Threads.FUNNELED)


class Broken(GlooBackend):
    """Cannot be opened."""

    name: ClassVar[str] = "broken"

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        raise OSError("the cable is missing")


class Altered(GlooBackend):
    """Gloo with endpoints of another class, and gloo's declaration."""

    endpoint_class: ClassVar[type[GlooEndpoint]]

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return _Altered(self.endpoint_class, super().open(world, options))


class _Altered(Transport):
    def __init__(self, endpoint_class: type[GlooEndpoint], transport: Transport) -> None:
        self._class = endpoint_class
        self._transport = transport

    def endpoint(self, name: str) -> Endpoint:
        endpoint = self._transport.endpoint(name)
        assert isinstance(endpoint, GlooEndpoint)
        return self._class(endpoint._group)


class _EarlyEndpoint(GlooEndpoint):
    def poll(self, work: Any) -> bool:
        return True


class Early(Altered):
    """Its poll says yes from the start."""

    name: ClassVar[str] = "early"
    endpoint_class: ClassVar[type[GlooEndpoint]] = _EarlyEndpoint


class _BlockingEndpoint(GlooEndpoint):
    def poll(self, work: Any) -> bool:
        self.wait(work)
        return True


class Blocking(Altered):
    """Its poll waits inside."""

    name: ClassVar[str] = "blocking"
    endpoint_class: ClassVar[type[GlooEndpoint]] = _BlockingEndpoint


class _CopyingEndpoint(GlooEndpoint):
    limit = 1000

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._kept: list[Any] = []

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        if tensor.nbytes > self.limit:
            return super().isend(tensor, dst, tag)
        self._kept.append(super().isend(tensor.clone(), dst, tag))
        return None

    def wait(self, work: Any) -> None:
        if work is not None:
            super().wait(work)


class Copying(Altered):
    """Copies sends of up to 1000 bytes, which complete at once."""

    name: ClassVar[str] = "copying"
    endpoint_class: ClassVar[type[GlooEndpoint]] = _CopyingEndpoint


class _UntaggedEndpoint(GlooEndpoint):
    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return super().isend(tensor, dst, 0)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return super().irecv(tensor, src, 0)


class Untagged(Altered):
    """Takes no notice of tags."""

    name: ClassVar[str] = "untagged"
    endpoint_class: ClassVar[type[GlooEndpoint]] = _UntaggedEndpoint


class _OvertakingEndpoint(GlooEndpoint):
    """Numbers the messages of tag 0 by tags of its own, and receives some in each other's place."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._sent = itertools.count()
        self._received = itertools.count()

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return super().isend(tensor, dst, 1_000_000 + tag if tag else next(self._sent))

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        if tag:
            return super().irecv(tensor, src, 1_000_000 + tag)
        place = next(self._received)
        return super().irecv(tensor, src, place + {8: 1, 9: -1}.get(place % 10, 0))


class Overtaking(Altered):
    """Every tenth message overtakes the one before it."""

    name: ClassVar[str] = "overtaking"
    endpoint_class: ClassVar[type[GlooEndpoint]] = _OvertakingEndpoint


class Untransportable(GlooBackend):
    """An instance that holds a live object."""

    name: ClassVar[str] = "untransportable"

    def __init__(self) -> None:
        self.callback = lambda: None


def _renamed_gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("renamed_gloo", _renamed_gloo, devices=["cpu"])
