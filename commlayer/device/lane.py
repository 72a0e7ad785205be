"""The device part of a lane: payload that completes on a stream.

Why a lane keeps native works and no stream of its own: torch hands out the few streams of a
device in turn, so that a stream of the lane's own may be the application's, too, or another
lane's.  One that waits for an operation that nobody has matched yet would hold those up, and
lanes would no longer be independent.  A work can be waited for by every stream that uses its
result, and asked by whoever wants to know; neither needs a stream or an event between.

Where a native wait holds up the host, or may be called only once, the lane has a task and a
stream.  The task waits on the host for the caller's stream before it posts, so that this
stream, too, never holds anything that is not ready to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from commlayer.device.backend import PairEndpoint
from commlayer.device.device import DeviceEvent, DeviceRuntime
from commlayer.errors import CommError
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import DevicePart, LaneKey, Operation
from commlayer.progress.polling import PollingProgress
from commlayer.progress.procedure import Completes, NativeWork, Procedure, Wait
from commlayer.progress.runtime import Runtime
from commlayer.semantics import OperationSemantics, Order, PostMayBlock, WaitBlocks

MOST_POSTED = 100
"""Native operations that a lane has on the device.  Each takes about four places in a queue of the
driver, which has a thousand; where it is full, calls block, and block every thread of Python."""


class DeviceWork(Protocol):
    """What a posted message can be waited for by."""

    def order(self) -> None:
        """Order the calling thread's current stream behind it; never blocks the host."""
        ...

    def done(self) -> bool:
        """Whether it is complete or has failed; raises what the transport reports."""
        ...


class HeldWorks:
    """The native works of one message: streams wait for them, and they are asked."""

    __slots__ = ("_device", "_source", "_works")

    def __init__(self, source: Completes, device: DeviceRuntime, works: Sequence[Any]) -> None:
        """`source` knows when one of `works` is complete."""
        self._source = source
        self._device = device
        self._works = works

    def order(self) -> None:
        for work in self._works:
            self._source.wait(work)

    def done(self) -> bool:
        return self._device.ask(self._polled)

    def _polled(self) -> bool:
        return all(self._source.poll(work) for work in self._works)


class PassedEvent:
    """An event that follows the works of one message, which are held until it has passed."""

    __slots__ = ("_device", "_event", "_works")

    def __init__(self, event: DeviceEvent, device: DeviceRuntime, works: object) -> None:
        self._event = event
        self._device = device
        self._works = works

    def order(self) -> None:
        self._event.wait(self._device.current_stream())

    def done(self) -> bool:
        return self._device.ask(self._event.query)


class LaneSide(Protocol):
    """What the device lanes of one connection share."""

    device: DeviceRuntime
    facts: OperationSemantics
    runtime: Runtime
    ledger: Ledger
    progress: PollingProgress
    lock: AbstractContextManager[object]

    @property
    def peer_failed(self) -> Callable[[int, Exception], object]:
        """Is told of a native error, with the rank of the peer.  Called without a lock."""
        ...

    def notify(self) -> None:
        """Wake those who wait for something to be posted."""
        ...

    def spare_event(self) -> DeviceEvent:
        """An event that nobody uses."""
        ...

    def give_back(self, event: DeviceEvent) -> None:
        """Say that nobody uses `event` any more."""
        ...


class _Message(NamedTuple):
    """What is to be posted for one operation.

    Without tensors it completes when what it `follows` does.  `finish` makes its value;
    `kernels` says that it launches some, for which the payload has to be here.
    """

    operation: Operation
    tensors: Sequence[Tensor]
    receives: bool
    finish: Callable[[], Any] = lambda: None
    kernels: bool = False
    follows: DevicePart | None = None


class _Posted(NamedTuple):
    message: _Message
    work: DeviceWork
    value: Any


class _Held(NamedTuple):
    """A message that a task posts once the caller's streams have come to `after`."""

    message: _Message
    after: Sequence[DeviceEvent]


class DeviceLane:
    """Posts one lane's device payload in program order and notices its completion.

    It has a native communicator of its own, so that neither another lane nor the opposite
    direction can hold it up.  `send` and `receive` are called on the user's threads, under the
    side's lock, with the current stream of the caller; never by a driver.  They never block.

    A message is posted at once where that cannot block.  It is held, and posted by a task of
    the lane in its turn, while the communicator is being made, where posting or waiting blocks
    the host, while `MOST_POSTED` operations are on the device, and behind one that is held.
    """

    def __init__(self, name: str, key: LaneKey, side: LaneSide) -> None:
        self.name = name
        self.key = key
        self._side = side
        self._device = side.device
        self._endpoint: PairEndpoint | None = None
        facts = side.facts
        self._waits_on_host = facts.wait_blocks is WaitBlocks.HOST
        self._keeps_works = not self._waits_on_host and facts.wait_repeatable
        self._last_is_all = facts.order is Order.IN_ORDER_STREAM
        self._posts_at_once = self._keeps_works and facts.post_may_block is not PostMayBlock.ALWAYS
        # While a post blocks, nothing else may be asked of some transports: then all that is
        # posted has to be complete before.
        self._most = MOST_POSTED if facts.post_may_block is not PostMayBlock.ALWAYS else 1
        self._stream: Any = None
        self._held: deque[_Held] = deque()
        self._queue: deque[_Posted] = deque()
        self._stranded: list[Any] = []
        self._current: Operation | None = None
        # Two counts, because each is written by one thread at a time, and not by the same.
        self._posted = 0
        self._ended = 0
        self._wake = side.runtime.event()
        self._post = side.runtime.event()
        self._finishing = False
        self._started = False
        self._posting = False
        self._error: CommError | None = None

    def _native_failed(self, error: Exception) -> None:
        self._side.peer_failed(self.key.peer, error)

    def connect(self, endpoint: PairEndpoint) -> None:
        """Give the lane its communicator, both ends of which are connected.  Under the lock."""
        self._endpoint = endpoint
        self._post.set()

    @property
    def refused(self) -> CommError | None:
        """Why the lane fails whatever it is given, if it does."""
        return self._error

    @property
    def connected(self) -> bool:
        """Whether the lane has a communicator."""
        return self._endpoint is not None

    def send(self, operation: Operation, tensors: Sequence[Tensor]) -> None:
        """Post sends of `tensors`; one part of `operation` is complete when they are."""
        self._take(_Message(operation, tensors, False))

    def receive(
        self,
        operation: Operation,
        tensors: Sequence[Tensor],
        finish: Callable[[], Any],
        *,
        kernels: bool = False,
        follows: DevicePart | None = None,
    ) -> None:
        """Post receives into `tensors`; `operation` completes when they are here.

        Without any it completes with what it `follows`, an earlier receive of the lane.
        `finish` makes its value; with `kernels` it launches some, and is called with a current
        stream on which they follow the payload.
        """
        self._take(_Message(operation, tensors, True, finish, kernels, follows))

    def _take(self, message: _Message) -> None:
        operation = message.operation
        if self._error is not None:
            self._side.ledger.fail(operation, self._error.again())
            return
        part = operation.device
        assert part is not None
        current = self._device.current_stream()
        earlier, part.after = part.after, None
        elsewhere = earlier is not None and earlier.stream != current
        if not self._started:
            self._started = True
            self._side.progress.start(self)
        if self._posts_now() and not elsewhere:
            if earlier is not None:
                self._side.give_back(earlier.event)
            self._post_message(message)
            return
        here = self._side.spare_event()
        here.record(current)
        self._held.append(_Held(message, (here,) if earlier is None else (here, earlier.event)))
        self._post.set()
        if not self._posting:
            self._posting = True
            self._side.runtime.spawn(self._post_held, f"commlayer post {self.name}")

    def _posts_now(self) -> bool:
        return self._posts_at_once and not self._held and self._has_room()

    def _has_room(self) -> bool:
        return self._endpoint is not None and self._posted - self._ended < self._most

    def _post_held(self) -> None:
        """Post what is held, in order, blocking as long as the transport does."""
        try:
            while True:
                self._post.clear()
                with self._side.lock:
                    if self._error is not None:
                        self._drop_held()
                    if not (self._held or self._keeps_its_task()):
                        self._posting = False
                        return
                    held = self._held[0] if self._held and self._has_room() else None
                if held is None:
                    self._post.wait()
                    continue
                for reached in held.after:
                    reached.synchronize()
                    self._side.give_back(reached)
                with self._own_stream():
                    self._post_message(held.message)
                del reached
                with self._side.lock:
                    # Until here it is among what `fail` fails.
                    if self._held:
                        self._held.popleft()
                del held
                self._wake.set()
        except Exception as error:
            self._native_failed(error)

    def _drop_held(self) -> None:
        """Forget what was failed before it was posted: no transport holds it."""
        for held in self._held:
            self._side.ledger.complete_device_part(held.message.operation)
        self._held.clear()

    def _keeps_its_task(self) -> bool:
        """Whether the task waits for what is posted next: a new one for each would cost more."""
        return not (self._posts_at_once or self._finishing or self._error is not None)

    def _own_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            self._stream = self._device.stream()
        return self._stream  # type: ignore[no-any-return]

    def _post_message(self, message: _Message) -> None:
        works: list[Any] = []
        try:
            self._post_into(works, message)
        except BaseException:
            # The transport may have begun to use the memory.
            self._stranded.append((message, works))
            raise

    def _post_into(self, works: list[Any], message: _Message) -> None:
        endpoint = self._endpoint
        assert endpoint is not None
        operation = message.operation
        post = endpoint.irecv if message.receives else endpoint.isend
        for tensor in message.tensors:
            work = post(tensor, self.key.peer, 0)
            if not self._keeps_works:
                endpoint.wait(work)
            works.append(work)
        self._posted += len(works)
        part = operation.device
        assert part is not None
        if not self._keeps_works:
            value = message.finish()
            done = self._passed(works)
        else:
            done = self._kept(works, message)
            if message.kernels:
                with self._own_stream():
                    done.order()
                    value = message.finish()
                    done = self._passed(works)
            else:
                value = message.finish()
        self._queue.append(_Posted(message, done, value))
        if message.receives:
            operation.value = value
        if not part.host_payload:
            part.work = done
        self._wake.set()
        self._side.progress.poll_soon()
        self._side.notify()

    def _kept(self, works: list[Any], message: _Message) -> DeviceWork:
        if not works:
            assert message.follows is not None
            earlier: DeviceWork = message.follows.work
            return earlier
        assert self._endpoint is not None
        return HeldWorks(self._endpoint, self._device, works[-1:] if self._last_is_all else works)

    def _passed(self, works: Sequence[Any]) -> DeviceWork:
        event = self._device.event()
        event.record(self._device.current_stream())
        return PassedEvent(event, self._device, works)

    # What its engine asks of it

    def poll(self, work: DeviceWork) -> bool:
        return work.done()

    def wait(self, work: DeviceWork) -> None:
        """Nothing: it was polled complete."""

    def steps(self) -> Procedure:
        while True:
            while not self._queue:
                if self._finishing and not self._held:
                    return
                self._wake.clear()
                if not self._queue and not (self._finishing and not self._held):
                    yield Wait(self._wake)
            posted = self._queue.popleft()
            message, value = posted.message, posted.value
            self._current = message.operation
            try:
                yield NativeWork(self, posted.work)
            except Exception as error:
                self._native_failed(error)
                return
            del posted
            self._current = None
            self._ended += len(message.tensors)
            self._post.set()
            self._side.ledger.complete_device_part(message.operation, value)
            # The generator lives on: it would keep the memory until the next message.
            del message, value

    def fail(self, error: CommError) -> None:
        """Fail every operation, now and later.  Called under the side's lock.

        Buffers stay with the lane until the device has let go of them.
        """
        if self._error is None:
            self._error = error
        current = self._current
        pending = [current] if current is not None else []
        pending += [posted.message.operation for posted in list(self._queue)]
        pending += [held.message.operation for held in list(self._held)]
        for operation in pending:
            self._side.ledger.fail(operation, error.again(), quarantine=True)
        self._post.set()

    def finish(self) -> None:
        """Say that nothing follows."""
        self._finishing = True
        self._wake.set()
        self._post.set()

    def abandon(self, error: BaseException) -> None:
        """In a task of its own: the caller may hold the side's lock."""
        failure = error if isinstance(error, Exception) else RuntimeError(str(error))
        self._side.runtime.spawn(lambda: self._native_failed(failure), f"commlayer end {self.name}")

    def abort(self) -> None:
        """Have the transport give up what it has, so that the device is free again.

        Called once every operation of the lane has failed: an aborted work looks complete.
        """
        if self._endpoint is not None:
            self._endpoint.abort()

    def close(self) -> None:
        """Release the communicator."""
        if self._endpoint is not None:
            self._endpoint.close()
