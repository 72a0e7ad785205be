"""The device part of a lane: payload that completes on a stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.device.device import DeviceEvent, DeviceRuntime
from commlayer.errors import CommError
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.polling import PollingProgress
from commlayer.progress.procedure import NativeWork, Procedure, Wait
from commlayer.progress.retention import DeviceHold
from commlayer.progress.runtime import Runtime
from commlayer.semantics import OperationSemantics, PostMayBlock, WaitBlocks


class StreamWork(NamedTuple):
    """Posted device operations, and the event that follows the last of them."""

    works: Sequence[Any]
    event: DeviceEvent


class LaneSide(Protocol):
    """What the device lanes of one connection share."""

    device: DeviceRuntime
    facts: OperationSemantics
    runtime: Runtime
    ledger: Ledger
    progress: PollingProgress
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
    """A post that waits for its time: `after` is where the callers' streams were."""

    operation: Operation
    tensors: Sequence[Tensor]
    receives: bool
    build: Callable[[], Any]
    after: Sequence[DeviceEvent]


class DeviceLane(Endpoint):
    """Posts one lane's device payload in program order and notices its completion by events.

    It has a native communicator of its own, so that neither another lane nor
    the opposite direction can hold it up.  `send` and `receive` are called on
    the user's threads, with the current stream of the caller, never by a driver.
    A stream of the lane's own waits for each native work and records the event,
    so that completion is exact whatever the transport's poll says, and several
    streams can wait for one operation.  The next native operation is posted
    behind that wait: a lane has one at a time on the device.

    Where posting or the native wait may block the host, a task of the lane
    posts, in order: the caller is never held up, and ranks that all send first
    do not wait for each other.  With FIRST_USE it does so only until the
    communicator is connected.
    """

    def __init__(
        self,
        name: str,
        key: LaneKey,
        endpoint: Endpoint,
        side: LaneSide,
        failed: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.key = key
        self._endpoint = endpoint
        self._side = side
        self._device = side.device
        self._failed = failed
        self._stream = side.device.stream()
        self._held: deque[_Held] = deque()
        self._queue: deque[_Posted] = deque()
        self._stranded: list[Any] = []
        self._current: Operation | None = None
        self._wake = side.runtime.event()
        self._finishing = False
        self._started = False
        self._blocking_wait = side.facts.wait_blocks is WaitBlocks.HOST
        self._direct = self._never_blocks(PostMayBlock.NEVER)
        self._posting = False

    def _never_blocks(self, *allowed: PostMayBlock) -> bool:
        return self._side.facts.post_may_block in allowed and not self._blocking_wait

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
        here = self._device.event()
        here.record(self._device.current_stream())
        part = operation.device
        earlier = None if part is None else part.after
        after = (here,) if earlier is None else (here, earlier)
        held = _Held(operation, tensors, receives, build, after)
        if self._direct:
            self._post(held)
        else:
            self._held.append(held)
        if not self._started:
            self._started = True
            self._side.progress.start(self)
        if self._held and not self._posting:
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
                        self._direct = self._never_blocks(
                            PostMayBlock.NEVER, PostMayBlock.FIRST_USE
                        )
                        self._wake.set()
                        return
        except Exception as error:
            self._failed(error)

    def _post(self, held: _Held) -> None:
        works: list[Any] = []
        try:
            self._post_into(works, held)
        except BaseException:
            self._stranded.append((held, works))
            raise

    def _post_into(self, works: list[Any], held: _Held) -> None:
        operation, tensors = held.operation, held.tensors
        post = self._endpoint.irecv if held.receives else self._endpoint.isend
        event = self._device.event()
        if self._blocking_wait:
            for reached in held.after:
                reached.synchronize()
        with self._stream:
            for reached in held.after:
                reached.wait(self._stream)
            for tensor in tensors:
                work = post(tensor, self.key.peer, 0)
                self._endpoint.wait(work)
                works.append(work)
            value = held.build()
            event.record(self._stream)
        work = StreamWork(works, event)
        part = operation.device
        assert part is not None
        kept = held.receives or part.hold is not DeviceHold.POST
        self._queue.append(_Posted(operation, work, tensors if kept else (), value))
        if held.receives:
            operation.value = value
        if not part.host_payload:
            part.work = work
        self._wake.set()
        self._side.progress.poll_soon()
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
                    yield Wait(self._wake)
            posted = self._queue.popleft()
            operation, value = posted.operation, posted.value
            self._current = operation
            try:
                yield NativeWork(self, posted.work)
            except Exception as error:
                self._failed(error)
                return
            del posted
            self._current = None
            self._side.ledger.complete_device_part(operation, value)
            del operation, value

    def fail(self, error: CommError) -> None:
        """Fail every operation.  Called under the side's lock.

        Buffers stay with the lane until the device has let go of them.
        """
        current = self._current
        pending = [current] if current is not None else []
        pending += [posted.operation for posted in list(self._queue)]
        pending += [held.operation for held in list(self._held)]
        for operation in pending:
            self._side.ledger.fail(operation, error.again(), quarantine=True)

    def finish(self) -> None:
        """Say that nothing follows."""
        self._finishing = True
        self._wake.set()

    def abandon(self, error: BaseException) -> None:
        """In a task of its own: the caller may hold the side's lock."""
        failure = error if isinstance(error, Exception) else RuntimeError(str(error))
        self._side.runtime.spawn(lambda: self._failed(failure), f"commlayer end {self.name}")

    def close(self) -> None:
        self._endpoint.close()
