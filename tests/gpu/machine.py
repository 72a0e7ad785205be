"""What a case sees of the device it runs on: the real one, or the simulated one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.communicator import Communicator
from commlayer.device.device import DeviceRuntime
from commlayer.progress.runtime import Runtime


class EarlyReuse(Exception):
    """Memory was handed out again while a stream was still to read it."""


class NotApplicable(Exception):
    """The machine lacks what the case is about; the message says what."""


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class Machine(Protocol):
    """One rank's device, and the communicator of the case's ranks over it.

    `block` is a size in bytes that the allocator does not split; `repeats` how
    often to measure; `figures` what the case reports; `timed` whether the wall
    clock means anything.
    """

    device: DeviceRuntime
    runtime: Runtime
    block: int
    repeats: int
    timed: bool
    figures: dict[str, object]

    @property
    def comm(self) -> Communicator:
        """The communicator of the case's ranks, connected on first use."""
        ...

    @property
    def plain(self) -> Endpoint:
        """The transport itself, without the library, to the other of two ranks."""
        ...

    def launch(
        self,
        what: str,
        kernel: Callable[..., object],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        """Give ``kernel(*reads, *writes)`` to the current stream."""
        ...

    def value(self, tensor: Tensor) -> int:
        """What every byte of `tensor` is, -1 if they differ.  Its writes must be complete."""
        ...

    def busy(self, stream: Any) -> AbstractContextManager[object]:
        """Keep `stream` busy until the end of the block, which must not wait for it."""
        ...

    def synchronize(self) -> None:
        """Block the host until every stream is idle."""
        ...

    def held_bytes(self) -> int:
        """Bytes in use, or freed and held back by the allocator for another stream."""
        ...

    def capture(self) -> AbstractContextManager[Graph]:
        """Capture what is launched inside into a graph, in the strictest mode."""
        ...

    def collective(self, tensor: Tensor) -> Any:
        """Post a broadcast in a group of this rank alone; returns the native work."""
        ...

    def staged(self, value: int) -> Tensor:
        """Pinned host memory of `block` bytes."""
        ...


@dataclass(frozen=True)
class Case:
    """One thing to find out.  `ranks` are functions of a machine, one per rank.

    `reuse`: the case is right when it ends in `EarlyReuse`.
    """

    name: str
    expected: str
    ranks: tuple[Callable[[Machine], object], ...]
    reuse: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    case: Case
    passed: bool
    seen: str
    figures: dict[str, object]
    skipped: bool = False


def full(machine: Machine, value: int) -> Tensor:
    """`block` bytes filled by a kernel on the current stream."""
    tensor = empty(machine)
    machine.launch("fill", lambda out: out.fill_(value), writes=[tensor])
    return tensor


def empty(machine: Machine) -> Tensor:
    """`block` bytes, uninitialised."""
    return machine.device.empty((machine.block,), torch.uint8)


def copy(machine: Machine, source: Tensor, into: Tensor) -> None:
    """Copy on the current stream."""
    machine.launch("copy", lambda a, b: b.copy_(a), reads=[source], writes=[into])


def recorded(machine: Machine) -> Any:
    """An event where the current stream is now."""
    event = machine.device.event()
    event.record(machine.device.current_stream())
    return event


def eventually(machine: Machine, ready: Callable[[], bool], what: str, limit: float = 20.0) -> None:
    """Ask until `ready`, without a wait; fails after `limit` seconds of the machine's clock."""
    deadline = machine.runtime.now() + limit
    while not ready():
        assert machine.runtime.now() < deadline, f"{what}: not within {limit:g} s"
        machine.runtime.sleep(0.001)


def median_us(durations: Sequence[float]) -> float:
    """The median of seconds, in microseconds."""
    return statistics.median(durations) * 1e6
