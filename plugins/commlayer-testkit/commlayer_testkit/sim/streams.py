"""Device streams and events, with the shape of torch's accelerator API.

`SimDevice` plays `torch.accelerator` for one rank, `SimStream` `torch.Stream`
and `SimEvent` `torch.Event`.  A stream is an actor that runs what it was given in
order; kernels are functions on real tensors that run when the stream gets there,
by address: a kernel keeps no tensor alive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.memory import Buffer
from commlayer_testkit.sim.world import Actor, World, memory_bit, site

if TYPE_CHECKING:
    from commlayer_testkit.sim.rank import Rank


class Item:
    """One entry of a stream.  `ready` is pure; `run` may be called again while it returns False."""

    what = "work"

    def ready(self) -> bool:
        return True

    def run(self) -> bool:
        """Do the next part; True when the entry is done."""
        raise NotImplementedError

    def describe(self) -> str:
        return self.what

    def waits_for(self) -> list[object]:
        return []


class SimStream(Actor):
    """`torch.Stream`: an in-order queue of device work."""

    __slots__ = ("_previous", "device", "queue")

    def __init__(self, device: SimDevice, name: str) -> None:
        world = device.world
        super().__init__(world, f"rank {device.rank.index} stream {name}", writes=world.bit())
        self.device = device
        self.queue: deque[Item | Callable[[], object]] = deque()
        self._previous: SimStream | None = None

    # -- the actor ------------------------------------------------------------

    def ready(self) -> bool:
        queue = self.queue
        return bool(queue) and queue[0].ready()  # type: ignore[union-attr]

    def step(self) -> None:
        item = self.queue[0]
        assert isinstance(item, Item)
        self.world.note(self.name, item.what)
        self.world.version += 1
        if item.run():
            self.queue.popleft()
            while self.queue and not isinstance(self.queue[0], Item):
                self.queue.popleft()()  # type: ignore[operator]

    def enqueue(self, item: Item) -> None:
        self.queue.append(item)
        self.world.version += 1

    def then(self, callback: Callable[[], object]) -> None:
        """Call `callback` where the stream gets to this point; at once if it is idle."""
        self.world.touch(writes=self.writes)
        if self.queue:
            self.queue.append(callback)
        else:
            callback()

    # -- torch.Stream ---------------------------------------------------------

    def query(self) -> bool:
        self.world.point()
        if not self.queue:
            return True
        self.world.spin(self)
        return False

    def synchronize(self) -> None:
        self.world.block(lambda: not self.queue, "synchronizes", self)

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        event = event or SimEvent(self.device)
        event.record(self)
        return event

    def wait_event(self, event: SimEvent) -> None:
        event.wait(self)

    def wait_stream(self, stream: SimStream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> SimStream:
        self._previous = self.device.current_stream()
        self.device.set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            self.device.set_stream(self._previous)

    # -- wait-for graph -------------------------------------------------------

    def describe(self) -> str:
        return self.name

    def waits_for(self) -> list[object]:
        return [item for item in list(self.queue)[:1] if isinstance(item, Item)]


class SimEvent:
    """`torch.Event`: a point in a stream.  Unrecorded, it counts as passed."""

    __slots__ = ("_recorded", "_stream", "device", "passed")

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self._recorded = 0
        self._stream: SimStream | None = None
        self.passed = 0

    def record(self, stream: SimStream | None = None) -> None:
        stream = stream or self.device.current_stream()
        self._recorded += 1
        self._stream = stream
        stream.enqueue(_Record(self, self._recorded))

    def wait(self, stream: SimStream | None = None) -> None:
        """Order what `stream` is given from now on after the latest record."""
        stream = stream or self.device.current_stream()
        if self._stream is not None:
            self.device.world.touch(reads=self._stream.writes)
        if self.passed < self._recorded and stream is not self._stream:
            stream.enqueue(_WaitEvent(self, self._recorded))

    def query(self) -> bool:
        self.device.world.point()
        if self.passed >= self._recorded:
            return True
        self.device.world.spin(self)
        return False

    def synchronize(self) -> None:
        target = self._recorded
        self.device.world.block(lambda: self.passed >= target, "synchronizes", self)

    def describe(self) -> str:
        return f"event on {self._stream.name}" if self._stream else "event"

    def waits_for(self) -> list[object]:
        return [self._stream] if self._stream and self.passed < self._recorded else []


class _Record(Item):
    __slots__ = ("event", "number")
    what = "record event"

    def __init__(self, event: SimEvent, number: int) -> None:
        self.event = event
        self.number = number

    def run(self) -> bool:
        self.event.passed = max(self.event.passed, self.number)
        return True


class _WaitEvent(Item):
    __slots__ = ("event", "number")
    what = "wait event"

    def __init__(self, event: SimEvent, number: int) -> None:
        self.event = event
        self.number = number

    def ready(self) -> bool:
        return self.event.passed >= self.number

    def run(self) -> bool:
        return True

    def waits_for(self) -> list[object]:
        return self.event.waits_for()


class _Kernel(Item):
    def __init__(
        self,
        device: SimDevice,
        what: str,
        function: Callable[..., object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        world, arena = device.world, device.rank.arena
        self.what = what
        self.function = function
        self.world = world
        self.memory = memory_bit(device.rank.index)
        self.site = site() if world.explain else ""
        self.reads = [Buffer(world, t, self.describe, hold=False, arena=arena) for t in reads]
        self.writes = [Buffer(world, t, self.describe, hold=False, arena=arena) for t in writes]
        self.views = [
            (t.data_ptr(), t.numel() * t.element_size(), t.dtype, t.shape)
            for t in (*reads, *writes)
        ]
        self.issued = world.issue()

    def run(self) -> bool:
        self.world.touch(writes=self.memory)
        by = f"kernel {self.what!r}" + (f" launched at {self.site}" if self.site else "")
        for buffer in self.reads:
            if not buffer.touch("reads", by):
                return True
            block = buffer.block
            if block is not None and block.incoming and block.incoming[0] < self.issued:
                self.world.fail(
                    FailureKind.EARLY_READ,
                    f"{by} reads the result of {block.incoming[1]} before it is complete",
                    unwind=False,
                )
                return True
        for buffer in self.writes:
            if not buffer.touch("writes", by):
                return True
            if buffer.block is not None:
                buffer.block.written, buffer.block.written_at = self.issued, by
        try:
            self.function(*(_view(*view) for view in self.views))
        except AssertionError as error:
            self.world.fail(FailureKind.ERROR, f"{by}: {error}", unwind=False)
        return True


def _view(address: int, nbytes: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    import ctypes

    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    place = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(place, dtype=torch.uint8).view(dtype).view(shape)


class SimDevice:
    """`torch.accelerator` for one rank.  Each task has its own current stream."""

    def __init__(self, world: World, rank: Rank) -> None:
        self.world = world
        self.rank = rank
        self._streams: list[SimStream] = []
        self._drawn = 0
        self.default_stream = self.stream("main")

    def stream(self, name: str = "") -> SimStream:
        """A new stream; from a pool, one that somebody else may have, too."""
        pool = self.world.profile.pool
        if pool and len(self._streams) > pool:
            self._drawn += 1
            return self._streams[1 + (self._drawn - 1) % pool]  # the default stream is in no pool
        stream = SimStream(self, name or f"side {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def event(self) -> SimEvent:
        """A new event."""
        return SimEvent(self)

    def current_stream(self) -> SimStream:
        task = self.world.running
        stream = task.stream if task is not None else None
        return stream if isinstance(stream, SimStream) else self.default_stream

    def set_stream(self, stream: SimStream) -> None:
        task = self.world.running
        if task is None:
            raise RuntimeError("set_stream outside a task")
        task.stream = stream

    def synchronize(self) -> None:
        """Block the host until every stream of the rank is idle."""
        self.world.block(lambda: not any(s.queue for s in self._streams), "synchronizes", self)

    def record_stream(self, tensor: torch.Tensor, stream: SimStream) -> None:
        """`Tensor.record_stream`."""
        self.rank.arena.record_stream(tensor, stream)

    def launch(
        self,
        what: str,
        function: Callable[..., Any],
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Give ``function(*reads, *writes)`` to the current stream.

        It runs later, on the memory that the tensors name now.
        """
        kernel = _Kernel(self, what, function, reads, writes)
        self.current_stream().enqueue(kernel)

    def describe(self) -> str:
        return f"{self.rank.name} device"

    def waits_for(self) -> list[object]:
        return [stream for stream in self._streams if stream.queue]

    def close(self) -> None:
        for stream in self._streams:
            stream.queue.clear()
        self._streams.clear()
