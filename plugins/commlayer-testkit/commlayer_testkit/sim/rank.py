"""What a scenario's code sees of its rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from commlayer_testkit.sim.memory import Arena
from commlayer_testkit.sim.profiles import Profile
from commlayer_testkit.sim.runtime import SimRuntime, TaskEvent, TaskLock
from commlayer_testkit.sim.streams import SimDevice
from commlayer_testkit.sim.transport import SimEndpoint, SimTransport
from commlayer_testkit.sim.world import Task, World


class Rank:
    """One rank: its tasks, its endpoints, its device.

    `arena` and `device` are made on first use.
    """

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.name = f"rank {index}"
        self._arena: Arena | None = None
        self._device: SimDevice | None = None

    @property
    def arena(self) -> Arena:
        """Device memory of this rank; made at its first use."""
        if self._arena is None:
            self._arena = Arena(self.world, self)
        return self._arena

    @property
    def arena_used(self) -> Arena | None:
        """The arena, if anything was allocated in it."""
        return self._arena

    @property
    def device(self) -> SimDevice:
        """The device of this rank: streams, events and kernels."""
        if self._device is None:
            self._device = SimDevice(self.world, self)
        return self._device

    @property
    def runtime(self) -> SimRuntime:
        """Tasks, locks, events and the clock of this rank."""
        return SimRuntime(self.world, self.index)

    def endpoint(self, name: str = "data", on: Profile | None = None) -> SimEndpoint:
        """The native communicator `name` of the world's transport, or of the one `on` describes."""
        return SimTransport(self.world.network(on), self.index).endpoint(name)

    def spawn(self, function: Callable[[], object], name: str, *, daemon: bool = False) -> Task:
        """Start a task of this rank; the world runs on until it ends unless it is a `daemon`."""
        return self.world.spawn(function, f"{self.name} {name}", rank=self.index, daemon=daemon)

    def lock(self) -> TaskLock:
        """A lock that tasks of this rank share."""
        return TaskLock(self.world)

    def event(self, name: str = "event") -> TaskEvent:
        """An event that tasks of this rank share."""
        return TaskEvent(self.world, f"{self.name} {name}")

    def sleep(self, seconds: float) -> None:
        """Let virtual seconds pass."""
        self.runtime.sleep(seconds)

    @contextmanager
    def naming(self, label: str) -> Iterator[None]:
        """Operations that the calling task posts inside carry `label` in reports."""
        task = self.world.running
        assert task is not None
        before, task.label = task.label, label
        try:
            yield
        finally:
            task.label = before

    def close(self) -> None:
        """Release what the rank holds outside the world."""
        if self._arena is not None:
            self._arena.close()
        if self._device is not None:
            self._device.close()


def filled(value: int, nbytes: int = 8) -> torch.Tensor:
    """A host tensor of `nbytes` bytes, each `value`."""
    return torch.full((nbytes,), value, dtype=torch.uint8)


def blank(nbytes: int = 8) -> torch.Tensor:
    """A host tensor to receive into."""
    return torch.zeros(nbytes, dtype=torch.uint8)
