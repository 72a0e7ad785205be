"""Endpoints that pass every call on.  A mutant overrides the call that it spoils."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commlayer.backend import Endpoint, Transport, World
from commlayer.wire.tags import CONTROL_LANE, TagMap

TAG_BITS = 18
"""Of a native tag, below the number of the channel: see `commlayer.wire.tags`."""


class Relay(Endpoint):
    """An honest endpoint around another."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        self.inner = inner
        self.rank = rank
        self.size = size

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return self.inner.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return self.inner.irecv(tensor, src, tag)

    def wait(self, work: Any) -> None:
        self.inner.wait(work)

    def poll(self, work: Any) -> bool:
        return bool(self.inner.poll(work))

    def close(self) -> None:
        self.inner.close()


class RelayTransport(Transport):
    """Puts a relay around each endpoint of another transport."""

    def __init__(self, inner: Transport, relay: type[Relay], world: World) -> None:
        self.inner = inner
        self.relay = relay
        self.world = world

    def endpoint(self, name: str) -> Endpoint:
        return self.relay(self.inner.endpoint(name), self.world.rank, self.world.size)

    def close(self) -> None:
        self.inner.close()


class TagsMerged(Relay):
    """Tags that differ in their two lowest bits are one tag."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return super().isend(tensor, dst, tag & ~3)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return super().irecv(tensor, src, tag & ~3)


class HighTagBitsIgnored(Relay):
    """Tags are cut to 18 bits."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return super().isend(tensor, dst, tag % (1 << TAG_BITS))

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return super().irecv(tensor, src, tag % (1 << TAG_BITS))


class ControlNeverMatched(Relay):
    """Sends on the lane of the library's own messages go to a tag where nobody receives."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        lost = tag == TagMap(()).native(*CONTROL_LANE)
        return super().isend(tensor, dst, tag | 1 << 18 if lost else tag)


class WrongSource(Relay):
    """Where there are more than two ranks, a receive takes the messages of the next one."""

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        others = [rank for rank in range(self.size) if rank != self.rank]
        wrong = others[(others.index(src) + 1) % len(others)]
        return super().irecv(tensor, wrong, tag)
