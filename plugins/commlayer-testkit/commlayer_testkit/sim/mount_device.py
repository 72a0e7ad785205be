"""The library's own communicator on a simulated device beside a simulated host transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch

from commlayer.backend import PLUGIN_API, Viability
from commlayer.device.backend import StreamBackend
from commlayer.semantics import Semantics
from commlayer_testkit.sim.operation import SimWork
from commlayer_testkit.sim.profiles import Profile
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.streams import SimEvent, SimStream
from commlayer_testkit.sim.transport import SimEndpoint
from commlayer_testkit.sim.world import EVERYTHING


class SimDeviceRuntime:
    """`commlayer.device.device.DeviceRuntime` over a rank's simulated device and arena."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def attach(self) -> None:
        """Nothing: a simulated task is on the device of its rank."""

    def stream(self) -> AbstractContextManager[SimStream]:
        return self._rank.device.stream()

    def event(self) -> SimEvent:
        return self._rank.device.event()

    def current_stream(self) -> SimStream:
        return self._rank.device.current_stream()

    def holds(self, tensor: torch.Tensor) -> bool:
        arena = self._rank.arena_used
        return arena is not None and arena.find(tensor) is not None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)  # the arena knows memory by its address
        return self._rank.arena.empty(*shape, dtype=dtype)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        shape, strides = into.shape, into.stride()
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        span = into.as_strided((extent,), (1,))
        self._rank.device.launch(
            "copy",
            lambda data, place: place.as_strided(shape, strides, 0).copy_(data),
            reads=[source],
            writes=[span],
        )

    def record_stream(self, tensor: torch.Tensor, stream: SimStream) -> None:
        self._rank.device.record_stream(tensor, stream)

    def capturing(self) -> bool:
        return False

    def ask(self, query: Callable[[], bool]) -> bool:
        return query()

    def failed_here(self, error: BaseException) -> bool:
        return isinstance(error, torch.AcceleratorError)


class SimGroup:
    """The part of a c10d process group of two ranks that backends use."""

    def __init__(self, endpoint: SimEndpoint, members: Sequence[int]) -> None:
        self._endpoint = endpoint
        self._members = members

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> SimWork:
        return self._endpoint.isend(tensors[0], self._members[dst], tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> SimWork:
        return self._endpoint.irecv(tensors[0], self._members[src], tag)


class SimStore:
    """One client of a store: what is asked of it goes one after the other, as of torch's."""

    def __init__(self, rank: Rank, values: dict[str, bytes] | None = None) -> None:
        self._rank = rank
        self._values = rank.world.stored if values is None else values
        self._lock = rank.runtime.lock()

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._rank.world.touch(writes=EVERYTHING)
            self._values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            self._rank.world.block(lambda: key in self._values, f"reads {key!r}", None)
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def clone(self) -> SimStore:
        return SimStore(self._rank, self._values)


class _Creation:
    """A communicator that a rank makes."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank

    def describe(self) -> str:
        return f"rank {self.rank} making {self.name!r}"

    def waits_for(self) -> list[object]:
        return []


class SimStreamBackend(StreamBackend):
    """The device transport that `profile` describes, for one rank of a world."""

    name = "sim_device"
    host = "sim"
    plugin_api = (PLUGIN_API, PLUGIN_API)
    semantics = Semantics()

    def __init__(self, rank: Rank, profile: Profile) -> None:
        self._rank = rank
        self._profile = profile
        self.semantics = profile.semantics  # type: ignore[misc]

    def viability(self) -> Viability:
        return Viability(True, "the simulator runs anywhere")

    def device(self) -> SimDeviceRuntime:
        return SimDeviceRuntime(self._rank)

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> SimGroup:
        low, high = map(int, name.rsplit("/", 1)[1].split("-"))
        if self._profile.makes_one_at_a_time:
            if rank == 0:
                store.set(name, b"")
            else:
                store.get(name)
            self._meet(name, high if rank == 0 else low)
        return SimGroup(self._rank.endpoint(name, on=self._profile), (low, high))

    def _meet(self, name: str, other: int) -> None:
        """Make the communicator with `other`, and nothing else meanwhile."""
        world, network, me = self._rank.world, self._rank.world.network(self._profile), self._rank
        creation = _Creation(name, me.index)
        world.touch(writes=EVERYTHING)
        world.block(lambda: me.index not in network.making, "waits to make one", creation)
        network.making[me.index] = name
        network.begun.add((name, me.index))
        world.touch(writes=EVERYTHING)
        world.block(lambda: (name, other) in network.begun, "makes a communicator", creation)
        del network.making[me.index]
        world.touch(writes=EVERYTHING)
