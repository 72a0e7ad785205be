"""The real device: one GPU, real streams, events and the caching allocator.

Where a case has two ranks they are two threads of this process, connected by
Gloo for headers and, since NCCL does not send from a device to itself, by
copies on a stream of the connection for what is on the device.  The loopback
does not retain what it reads: that is the library's part.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from commlayer_gloo import GlooBackend
from commlayer_nccl import SEMANTICS, NcclBackend
from gpu.machine import Case, EarlyReuse, NotApplicable, Outcome
from torch import Tensor

from commlayer.backend import Endpoint, Viability, World
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.device.backend import PairEndpoint, StreamBackend
from commlayer.device.device import DeviceEvent, DeviceRuntime
from commlayer.errors import CommError
from commlayer.loading import LoadedBackend
from commlayer.progress.runtime import ThreadRuntime
from commlayer.registry import Registry
from commlayer.semantics import Semantics

RANK_LIMIT = 60.0
"""Seconds that a case may take."""
BUSY_SECONDS = (0.2, 1.0, 4.0)
"""How long a stream is kept busy, in successive tries."""


class _TooSlow(Exception):
    """The host was not done before a busy stream was."""


class RealDevice:
    """Runs cases on the current CUDA device."""

    def __init__(self) -> None:
        self.title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        self._cycles_per_second = _cycles_per_second()

    def run(self, case: Case) -> Outcome:
        for seconds in BUSY_SECONDS:
            figures: dict[str, object] = {}
            error = self._attempt(case, seconds, figures)
            if isinstance(error, _TooSlow):
                continue
            if isinstance(error, NotApplicable):
                return Outcome(case, True, str(error), figures, skipped=True)
            if isinstance(error, EarlyReuse):
                return Outcome(case, case.reuse, f"early reuse: {error}", figures)
            if error is not None:
                return Outcome(case, False, f"{type(error).__name__}: {error}", figures)
            return Outcome(case, not case.reuse, "as expected", figures)
        return Outcome(case, False, f"the host was slower than {seconds:g} s every time", figures)

    def _attempt(
        self, case: Case, seconds: float, figures: dict[str, object]
    ) -> BaseException | None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        meeting = Meeting(len(case.ranks))
        busy_cycles = int(seconds * self._cycles_per_second)
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            machine = RealMachine(meeting, rank, busy_cycles, figures)
            try:
                case.ranks[rank](machine)
            except BaseException as error:
                errors.append(error)
            try:
                machine.close()
            except CommError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(len(case.ranks))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(RANK_LIMIT)
        if not errors and any(thread.is_alive() for thread in threads):
            return TimeoutError(f"not over after {RANK_LIMIT:g} s")
        slow = [error for error in errors if isinstance(error, _TooSlow)]
        return (slow or errors or [None])[0]


def _cycles_per_second() -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    torch.cuda._sleep(cycles)
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) * 1e-3)


class Meeting:
    """Where the ranks of one case find each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        self._wires: dict[str, _Wire] = {}
        self._lock = threading.Lock()

    def wire(self, name: str, device: DeviceRuntime) -> _Wire:
        with self._lock:
            if name not in self._wires:
                self._wires[name] = _Wire(device)
            return self._wires[name]


class _Wire:
    """A connection of two ranks on one device: one stream, and what was sent on it."""

    def __init__(self, device: DeviceRuntime) -> None:
        self.stream: Any = device.stream()
        self.sent: tuple[queue.Queue[Tensor], queue.Queue[Tensor]] = (queue.Queue(), queue.Queue())


class LoopbackWork:
    """A copy on the wire's stream; `wait` orders the current stream after it."""

    def __init__(self, device: DeviceRuntime, event: DeviceEvent) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._event.wait(self._device.current_stream())

    def is_completed(self) -> bool:
        return self._event.query()


class LoopbackGroup:
    """The part of a c10d group of two ranks that backends use.  A send copies; it never blocks."""

    def __init__(self, wire: _Wire, rank: int, device: DeviceRuntime) -> None:
        self._wire = wire
        self._rank = rank
        self._device = device

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> LoopbackWork:
        def copy() -> None:
            self._wire.sent[self._rank].put(tensors[0].clone())

        return self._post(copy)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> LoopbackWork:
        staged = self._wire.sent[src].get(timeout=RANK_LIMIT / 2)
        return self._post(lambda: tensors[0].copy_(staged))

    def _post(self, copy: Callable[[], object]) -> LoopbackWork:
        ready, done = self._device.event(), self._device.event()
        ready.record(self._device.current_stream())
        with self._wire.stream:
            ready.wait(self._wire.stream)
            copy()
            done.record(self._wire.stream)
        return LoopbackWork(self._device, done)


class LoopbackBackend(StreamBackend):
    """The facts and the device of the ``nccl`` plugin, on loopback groups."""

    name: ClassVar[str] = "loopback"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS

    def __init__(self, meeting: Meeting, device: DeviceRuntime) -> None:
        self._meeting = meeting
        self._device = device

    def viability(self) -> Viability:
        return Viability(True, "made for this test")

    def device(self) -> DeviceRuntime:
        return self._device

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> LoopbackGroup:
        return LoopbackGroup(self._meeting.wire(name, self._device), rank, self._device)


class RealMachine:
    """`gpu.machine.Machine` for one rank's thread."""

    block = 4 << 20
    repeats = 300
    timed = True

    def __init__(
        self, meeting: Meeting, rank: int, busy_cycles: int, figures: dict[str, object]
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._busy_cycles = busy_cycles
        self.figures = figures
        self.device = NcclBackend().device()
        self.runtime = ThreadRuntime()
        self._comm: Communicator | None = None
        self._group: Any = None

    @property
    def comm(self) -> Communicator:
        if self._comm is None:
            self._comm = self._connect()
        return self._comm

    def _connect(self) -> Communicator:
        registry = Registry(())
        registry.add_backend(GlooBackend())
        store: Any = self._meeting.store
        return connect_world(
            World(self._rank, self._meeting.size, store, RANK_LIMIT / 2),
            LoadedBackend(LoopbackBackend(self._meeting, self.device), "this test", ""),
            CommConfig(),
            registry=registry,
        )

    @property
    def plain(self) -> Endpoint:
        wire = self._meeting.wire("plain", self.device)
        return PairEndpoint(LoopbackGroup(wire, self._rank, self.device), 1 - self._rank)

    def launch(
        self,
        what: str,
        kernel: Callable[..., object],
        *,
        reads: Sequence[Tensor] = (),
        writes: Sequence[Tensor] = (),
    ) -> None:
        kernel(*reads, *writes)

    def value(self, tensor: Tensor) -> int:
        host = tensor.cpu()
        return int(host[0]) if bool((host == host[0]).all()) else -1

    @contextmanager
    def busy(self, stream: Any) -> Iterator[None]:
        end = self.device.event()
        with stream:
            torch.cuda._sleep(self._busy_cycles)
            end.record(stream)
        try:
            yield
        finally:
            if end.query():
                raise _TooSlow

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def held_bytes(self) -> int:
        stats: Mapping[str, int] = torch.cuda.memory_stats()
        return stats["active_bytes.all.current"]

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with self.device.stream():
            graph.capture_begin(capture_error_mode="global")
            try:
                yield graph
            finally:
                graph.capture_end()

    def collective(self, tensor: Tensor) -> Any:
        if not dist.is_nccl_available():
            raise NotApplicable("torch is built without NCCL")
        if self._group is None:
            options: Any = dist.ProcessGroupNCCL.Options()
            self._group = dist.ProcessGroupNCCL(
                dist.PrefixStore("collective", self._meeting.store), 0, 1, options
            )
        root: Any = dist.BroadcastOptions()
        root.rootRank = 0
        root.rootTensor = 0
        root.asyncOp = True
        return self._group.broadcast([tensor], root)

    def staged(self, value: int) -> Tensor:
        return torch.full((self.block,), value, dtype=torch.uint8).pin_memory()

    def close(self) -> None:
        if self._comm is not None:
            self._comm.close(RANK_LIMIT / 4)
