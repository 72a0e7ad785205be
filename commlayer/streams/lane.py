"""The device part of a lane: payload that completes on a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.semantics import PostMayBlock
from commlayer.streams.device import DeviceEvent, DeviceRuntime
from commlayer.tracking.ledger import Ledger
from commlayer.tracking.operation import LaneKey, Operation
from commlayer.tracking.progress import NativeWork, Procedure, ProgressEngine
from commlayer.tracking.runtime import Runtime


class StreamWork(NamedTuple):
    """Posted device operations, and the event that follows the last of them."""

    works: Sequence[Any]
    event: DeviceEvent
    results: Sequence[Tensor]
    """Received memory, to be recorded on every stream that waits for it."""


class LaneSide(Protocol):
    """What the device lanes of one connection share."""

    device: DeviceRuntime
    runtime: Runtime
    ledger: Ledger
    progress: ProgressEngine
    post_may_block: PostMayBlock
    lock: AbstractContextManager[object]

    def notify(self) -> None:
        """Wake those who wait for something to be posted."""
        ...


class _Posted(NamedTuple):
    operation: Operation
    work: StreamWork
    tensors: Sequence[Tensor]
    value: Any


class _Held(NamedTuple):
    """A post that waits for its time: `after` is where the caller's stream was."""

    operation: Operation
    tensors: Sequence[Tensor]
    receives: bool
    build: Callable[[], Any]
    after: DeviceEvent


class DeviceLane(Endpoint):
    """Posts one lane's device payload in program order and notices its completion by events.

    It has a native communicator of its own, so that neither another lane nor
    the opposite direction can hold it up.  `send` and `receive` are called on
    the user's threads, with the current stream of the caller, never by a driver.
    A stream of the lane's own waits for each native work and records the event,
    so that completion is exact whatever the transport's poll says, and several
    streams can wait for one operation.

    Where posting may block the host, a task of the lane posts, in order: the
    caller is never held up, and ranks that all send first do not wait for each
    other.  With FIRST_USE it does so only until the communicator is connected.
    """

    def __init__(
        self,
        name: str,
        key: LaneKey,
        endpoint: Endpoint,
        side: LaneSide,
        failed: Callable[[Exception], object],
    ) -> None:
        self.name = name
        self._key = key
        self._endpoint = endpoint
        self._side = side
        self._device = side.device
        self._failed = failed
        self._stream = side.device.stream()
        self._held: deque[_Held] = deque()
        self._queue: deque[_Posted] = deque()
        self._wake = side.runtime.event()
        self._finishing = False
        self._started = False
        self._direct = side.post_may_block is PostMayBlock.NEVER
        self._posting = False

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return self._endpoint.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return self._endpoint.irecv(tensor, src, tag)

    def send(self, operation: Operation, tensors: Sequence[Tensor]) -> None:
        """Post sends of `tensors`; one part of `operation` is complete when they are."""
        self._hold(operation, tensors, False, lambda: None)

    def receive(
        self, operation: Operation, tensors: Sequence[Tensor], build: Callable[[], Any]
    ) -> None:
        """Post receives into `tensors`; `operation` completes when they are here.

        `build` makes its value.  It is called under a stream on which the
        tensors are complete.
        """
        self._hold(operation, tensors, True, build)

    def _hold(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        receives: bool,
        build: Callable[[], Any],
    ) -> None:
        after = self._device.event()
        after.record(self._device.current_stream())
        held = _Held(operation, tensors, receives, build, after)
        if self._direct:
            self._post(held)
            return
        self._held.append(held)
        if not self._posting:
            self._posting = True
            self._side.runtime.spawn(self._post_held, f"commlayer post {self.name}")

    def _post_held(self) -> None:
        """Post what is held, in order, blocking as long as the transport does."""
        try:
            while True:
                self._post(self._held[0])
                with self._side.lock:
                    self._held.popleft()
                    if not self._held:
                        self._posting = False
                        self._direct = self._side.post_may_block is PostMayBlock.FIRST_USE
                        self._wake.set()
                        return
        except Exception as error:
            self._failed(error)

    def _post(self, held: _Held) -> None:
        operation, tensors = held.operation, held.tensors
        post = self._endpoint.irecv if held.receives else self._endpoint.isend
        event = self._device.event()
        with self._stream:
            held.after.wait(self._stream)
            works = [post(tensor, self._key.peer, 0) for tensor in tensors]
            for work in works:
                self._endpoint.wait(work)
            value = held.build()
            event.record(self._stream)
        posted = StreamWork(works, event, tensors if held.receives else ())
        operation.value = value
        operation.stream_work = posted
        self._queue.append(_Posted(operation, posted, tensors, value))
        self._wake.set()
        if not self._started:
            self._started = True
            self._side.progress.start(self)
        self._side.notify()

    def poll(self, work: StreamWork) -> bool:
        return work.event.query()

    def wait(self, work: StreamWork) -> None:
        pass

    def steps(self) -> Procedure:
        while True:
            while not self._queue:
                if self._finishing and not self._held:
                    return
                self._wake.clear()
                if not self._queue and not (self._finishing and not self._held):
                    yield self._wake
            posted = self._queue.popleft()
            try:
                yield NativeWork(self, posted.work)
            except Exception as error:
                self._failed(error)
                return
            operation, value = posted.operation, posted.value
            del posted
            self._side.ledger.complete(operation, value)
            del operation, value

    def finish(self) -> None:
        """Say that nothing follows."""
        self._finishing = True
        self._wake.set()

    def abandon(self, error: BaseException) -> None:
        self._failed(error if isinstance(error, Exception) else RuntimeError(str(error)))

    def close(self) -> None:
        self._endpoint.close()
