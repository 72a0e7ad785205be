"""The simulated device: every case under a number of schedules of three transports.

A capture is modelled by the task that has one under way: it is told of no
completion, and must not block on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
from commlayer_testkit.sim import PROFILES, FailureKind, Profile, Rank, Scenario, World, explore
from commlayer_testkit.sim.mount_core import NoStore
from commlayer_testkit.sim.mount_device import SimDeviceRuntime, SimStreamBackend
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.streams import Item, SimEvent, SimStream
from commlayer_testkit.sim.transport import SimBackend
from gpu.machine import Case, EarlyReuse, Outcome
from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.backend import World as BackendWorld
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry
from commlayer.semantics import Capture

SCHEDULES = 30
TRANSPORTS = ("nccl", "xccl", "hccl")


class SimulatedDevices:
    """Runs cases on the simulator."""

    title = "the simulated device"

    def __init__(self, schedules: int = SCHEDULES, transports: Sequence[str] = TRANSPORTS) -> None:
        self._schedules = schedules
        self._transports = transports

    def run(self, case: Case) -> Outcome:
        figures: dict[str, object] = {}
        seen, passed = "", True
        for name in self._transports:
            seen, passed = self._explore(case, name, figures)
            if not passed:
                seen = f"{name}: {seen}"
                break
        figures["schedules"] = f"{self._schedules} x {', '.join(self._transports)}"
        return Outcome(case, passed, seen, figures)

    def _explore(self, case: Case, transport: str, figures: dict[str, object]) -> tuple[str, bool]:
        def setup(world: World) -> None:
            world.start(len(case.ranks), lambda rank: _run_rank(case, rank, figures))

        report = explore(
            Scenario(case.name, setup, None, (transport,)),
            on=_without_capture(PROFILES[transport]),
            strategy="random",
            budget=self._schedules,
            verify_every=0,
            shrink=False,
        )
        failure = report.failure
        if failure is None:
            return "as expected in every schedule", not case.reuse
        reused = failure.kind is FailureKind.USE_AFTER_FREE or EarlyReuse.__name__ in failure.what
        return ("early reuse" if reused else str(failure)), case.reuse and reused


def _without_capture(profile: Profile) -> Profile:
    semantics = msgspec.structs.replace(profile.semantics, capture=Capture.REFUSED)
    return Profile(profile.name, semantics, profile.note, profile.watchdog)


def _run_rank(case: Case, rank: Rank, figures: dict[str, object]) -> None:
    machine = SimulatedMachine(rank, figures)
    case.ranks[rank.index](machine)
    machine.close()


class _Gate(Item):
    what = "be busy"
    opened = False

    def ready(self) -> bool:
        return self.opened

    def run(self) -> bool:
        return True


class _CapturableEvent(SimEvent):
    """Not known to have passed by the task that captures."""

    __slots__ = ("_runtime",)

    def __init__(self, rank: Rank, runtime: CapturableDevice) -> None:
        super().__init__(rank.device)
        self._runtime = runtime

    def query(self) -> bool:
        return not self._runtime.capturing() and super().query()

    def synchronize(self) -> None:
        if self._runtime.capturing():
            self.device.world.fail(FailureKind.MISUSE, "a capturing task blocks on the device")
        super().synchronize()


class CapturableDevice(SimDeviceRuntime):
    """The simulated device, with a capture that one task can have under way."""

    def __init__(self, rank: Rank) -> None:
        super().__init__(rank)
        self.rank = rank
        self.capturer: object = None

    def event(self) -> SimEvent:
        return _CapturableEvent(self.rank, self)

    def capturing(self) -> bool:
        return self.capturer is not None and self.rank.world.running is self.capturer


class _Backend(SimStreamBackend):
    def __init__(self, rank: Rank, profile: Profile, device: CapturableDevice) -> None:
        super().__init__(rank, profile)
        self._device = device

    def device(self) -> CapturableDevice:
        return self._device


class _Graph(list[Callable[[], None]]):
    def replay(self) -> None:
        for launch in self:
            launch()


class _AloneWork:
    """A collective of one rank: done where its stream gets to it."""

    def __init__(self, event: SimEvent) -> None:
        self._event = event

    def wait(self) -> bool:
        self._event.wait()
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def exception(self) -> None:
        return None


class SimulatedMachine:
    """`gpu.machine.Machine` for one rank of a world."""

    block = 64
    repeats = 3
    timed = False

    def __init__(self, rank: Rank, figures: dict[str, object]) -> None:
        self._rank = rank
        self.figures = figures
        self.device = CapturableDevice(rank)
        self.runtime = rank.runtime
        self._comm: Communicator | None = None
        self._graph: _Graph | None = None
        rank.arena  # noqa: B018  made here: a rank holds device memory from the start

    @property
    def comm(self) -> Communicator:
        if self._comm is None:
            self._comm = self._connect()
        return self._comm

    def _connect(self) -> Communicator:
        rank, world = self._rank, self._rank.world
        registry = Registry(())
        registry.add_backend(SimBackend(world, GLOO))
        return connect_world(
            BackendWorld(rank.index, len(world.ranks), NoStore(), 60.0),
            LoadedBackend(_Backend(rank, world.profile, self.device), "simulator", ""),
            CommConfig(),
            registry=registry,
            runtime=rank.runtime,
        )

    @property
    def plain(self) -> Endpoint:
        return self._rank.endpoint("plain")

    def launch(
        self,
        what: str,
        kernel: Callable[..., object],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        launch = partial(self._rank.device.launch, what, kernel, reads=reads, writes=writes)
        if self._graph is not None and self.device.capturing():
            self._graph.append(launch)
        else:
            launch()

    def value(self, tensor: Tensor) -> int:
        values = set(tensor.tolist())
        return int(values.pop()) if len(values) == 1 else -1

    @contextmanager
    def busy(self, stream: SimStream) -> Iterator[None]:
        gate = _Gate()
        stream.enqueue(gate)
        try:
            yield
        finally:
            world = self._rank.world
            world.touch(writes=stream.writes)
            world.version += 1
            gate.opened = True

    def synchronize(self) -> None:
        self._rank.device.synchronize()

    def held_bytes(self) -> int:
        return self._rank.arena.in_use

    @contextmanager
    def capture(self) -> Iterator[_Graph]:
        self._graph = graph = _Graph()
        with self.device.stream():
            self.device.capturer = self._rank.world.running
            try:
                yield graph
            finally:
                self.device.capturer = self._graph = None

    def collective(self, tensor: Tensor) -> Any:
        ready, done, stream = self.device.event(), self.device.event(), self.device.stream()
        ready.record()
        with stream:
            ready.wait(stream)
            self.launch("broadcast to nobody", lambda t: None, reads=[tensor])
            done.record(stream)
        return _AloneWork(done)

    def staged(self, value: int) -> Tensor:
        return torch.full((self.block,), value, dtype=torch.uint8)

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close(60)
