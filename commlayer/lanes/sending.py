"""The sending end of a lane: one FIFO of messages to a peer.

Three things make this hard.  A post is a native call, which may take long or call back, so no
lock may be held over it; yet messages must leave in the order of their numbers.  Therefore a
thread enters its message under a short lock and, if nobody else is posting, posts all that
is there (docs/decisions/009).  Completion shows only to who waits for each work, once and in
order, so a driver does that (003); but waking it costs more than a send, so sends that nobody
waits for are noticed in batches.  And the transport reads memory until a work is complete:
the lane keeps it that long and no longer.  A frame that still names a work or a message keeps
it, too, hence the `del` before each point at which the driver rests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from commlayer.device.payload import SendPayload
from commlayer.errors import CommError
from commlayer.lanes.context import LaneContext, LaneOwner, driver_died
from commlayer.progress.interrupts import came_by_signal, interrupted
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.procedure import NativeWork, Procedure, Wait
from commlayer.wire.frame import UNSLOTTED, Kind
from commlayer.wire.message import UNPLANNED, Outgoing, SendPlan, SentSchemas, plain
from commlayer.wire.tags import TagMap

_LINGER = 0.01
"""Seconds that completed sends of which nobody asks may stay unnoticed: long against a wake-up
(0.1 to 0.2 ms), short against what memory an engine allocates in a step."""
_LINGERS = 5
"""Idle checks, each after twice the last pause (10 to 160 ms), before the driver sleeps until it
is woken: an engine that sends every step never pays for a wake-up, an idle one costs nothing."""


class _InFlight(msgspec.Struct, eq=False):
    """A message on its way: what is still to be completed, and what must live until then.

    `entries` are native works, or on serial lanes what is still to be posted.  All are there
    once it is `posted`.
    """

    operation: Operation
    messages: Sequence[tuple[Tensor, int]]
    entries: deque[Any] = msgspec.field(default_factory=deque)
    posted: bool = False


class SendLane:
    """Posts messages to one peer and completes them in order.

    `post` may be called from any thread; the order of what several threads
    post is theirs to fix.  No lock is held over a native call: of several
    threads one posts for all.

    The driver is woken for operations that somebody waits for (`notice`), and
    otherwise looks after what was posted every now and then: a wake-up costs
    more than a send.
    """

    def __init__(self, context: LaneContext, owner: LaneOwner, key: LaneKey, tag: int) -> None:
        self.key = key
        self.name = f"send {key}"
        self._context = context
        self._owner = owner
        self._endpoint = context.endpoint
        self._tag = tag
        self._prefetch = owner.prefetch.on(key)
        self._schemas = SentSchemas(self._prefetch.slots)
        self._linger = _LINGER if context.progress.batches and not context.serial else 0.0
        # Guards the numbers, the two queues and `_error`.  Nothing native is called and no other
        # lock is taken under it; it comes after the payload's `turn` and the peer's lock.
        self._lock = context.runtime.lock()
        self._wake = context.runtime.event()
        # Every message is in `_queue` until it completes, and in `_outbox` until it is posted.
        self._outbox: deque[_InFlight] = deque()
        self._poster: Operation | None = None
        """That of the thread which posts all that is in the outbox; ``None`` while it is empty."""
        self._abandoned = False
        """Whether an interrupt took that thread away: the driver posts the rest."""
        self._queue: deque[_InFlight] = deque()
        self._ahead: dict[int, int] = {}
        """How many receives the peer has posted ahead on each slot that was used."""
        # What a failed post may have handed to the transport: it is kept for good.
        self._stranded: list[Any] = []
        device = context.device
        self._payload = None if device is None else SendPayload(device, key, self._device_failed)
        self._current: Operation | None = None
        self._sequence = 0
        self._noticed = -1
        self._idle = True
        self._finishing = False
        self._error: CommError | None = None
        self.stuck = False
        """Whether the lane was given up with operations inside the transport."""

    @property
    def pending(self) -> bool:
        """Whether native operations of this lane are outstanding."""
        return (
            self._current is not None
            or bool(self._queue)
            or (self._payload is not None and bool(self._payload.pending))
        )

    @property
    def posted(self) -> int:
        """How many messages were posted."""
        return self._sequence

    @property
    def wanted(self) -> bool:
        """Whether a native work that `steps` yields should be waited for at once."""
        return True

    def post(self, operation: Operation, outgoing: Outgoing) -> None:
        """Post `outgoing`; `operation` completes when the transport has let go of its buffers.

        Raises the lane's error if it has failed, and what posting raises.
        """
        if self._payload is None:
            self._post_host(operation, outgoing)
            return
        self._payload.open(outgoing)
        with self._payload.turn:
            self._post_host(operation, outgoing)
            self._post_device(operation, outgoing)

    def _post_host(self, operation: Operation, outgoing: Outgoing) -> None:
        # Before anything leaves: without a driver nobody would learn that it has arrived.  Only
        # an idle lane may have none, and one that becomes idle meanwhile is woken afterwards.
        if self._idle:
            self._context.progress.start(self)
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error.concerning(operation)
                number, ahead = self._sequence, self._ahead
                try:
                    plan = self._schemas.plan(outgoing.layout, outgoing.value)
                    messages = self._messages(outgoing, plan)
                    if self._payload is not None and outgoing.device_payload:
                        self._payload.expect(operation, outgoing)
                    if plan.slot > UNSLOTTED and ahead.get(plan.slot) != len(outgoing.payload):
                        self._ahead = {**ahead, plan.slot: len(outgoing.payload)}
                    self._enqueue(operation, messages)
                except BaseException:
                    self._ahead = ahead
                    self._take_back(operation, number)
                    raise
            if self._poster is operation:
                self._post_outbox(operation)
        except BaseException:
            # A signal handler may have raised anywhere.  What was entered is posted all the same.
            if self._poster is operation:
                self._abandoned = True
                self.wake()
            raise

    def _take_back(self, operation: Operation, number: int) -> None:
        """Undo what was begun for a message.  Under the lock."""
        if self._queue and self._queue[-1].operation is operation:
            self._queue.pop()
        if self._outbox and self._outbox[-1].operation is operation:
            self._outbox.pop()
        if self._poster is operation:
            self._poster = None
        self._sequence = number
        operation.sequence = -1
        operation.driven = None
        # The peer may not know what this had begun to number.  From here on nothing is named, and
        # no slot is given away.
        self._schemas = SentSchemas(0)

    def _messages(self, outgoing: Outgoing, plan: SendPlan) -> list[tuple[Tensor, int]]:
        """The native messages of `outgoing` in order, each with its tag."""
        head, body = outgoing.head(self._sequence, plan)
        messages = [(head, self._tag)]
        if body is not None:
            messages.append((body, TagMap.payload(self._tag, UNSLOTTED)))
        if outgoing.payload:
            tag = TagMap.payload(self._tag, plan.slot)
            messages.extend(_fillers(plan.fillers, tag))
            messages.extend((payload, tag) for payload in outgoing.payload)
        return messages

    def _enqueue(self, operation: Operation, messages: list[tuple[Tensor, int]]) -> None:
        """Give the message its number and its place; make it the poster's if nobody posts.

        Called under the lock.
        """
        operation.driven = self
        operation.sequence = self._sequence
        operation.retained = messages
        entered = _InFlight(operation, messages)
        self._queue.append(entered)
        self._outbox.append(entered)
        if self._poster is None:
            self._poster = operation
        self._sequence += 1

    def _post_outbox(self, mine: Operation | None) -> None:
        """Post what is in the outbox.  Raises where `mine` cannot be posted."""
        while True:
            with self._lock:
                while self._outbox and self._outbox[0].posted:
                    self._outbox.popleft()
                if not self._outbox or self.stuck:
                    self._poster = None
                    break
                entry = self._outbox[0]
            failure = self._post_native(entry)
            if failure is not None:
                self._post_failed(entry, failure, mine)
                return
        if self._idle or not self._linger:
            self.wake()

    def _post_native(self, posted: _InFlight) -> BaseException | None:
        if self._context.serial:
            if not posted.entries:
                posted.entries.extend(posted.messages)
            posted.posted = True
            return None
        works, peer, isend = posted.entries, self.key.peer, self._endpoint.isend
        try:
            for message, tag in posted.messages:
                works.append(isend(message, peer, tag))
        except BaseException as error:
            if len(works) == len(posted.messages):
                posted.posted = True  # an interrupt after the last of them
                raise
            self._stranded.append(posted)
            return error
        posted.posted = True
        return None

    def _post_failed(
        self, entry: _InFlight, failure: BaseException, mine: Operation | None
    ) -> None:
        with self._lock:
            # Never to be posted: the lane has failed with what is behind it.
            given_up = [each.operation for each in self._outbox]
            while self._outbox:
                self._queue.remove(self._outbox.pop())
            self._poster = None
        error = self._failed(failure)
        for operation in given_up:
            if operation is not mine or came_by_signal(failure):
                self._context.ledger.fail(operation, error.again(), quarantine=True)
        if came_by_signal(failure):
            raise failure
        if entry.operation is mine:
            raise error from failure

    def _failed(self, failure: BaseException) -> CommError:
        """The error of a native call: of the peer, or of the lane alone after an interrupt."""
        if isinstance(failure, Exception) and not came_by_signal(failure):
            return self._owner.transport_failed(failure)
        error = interrupted(self.name, failure)
        self.fail(error, stuck=True)
        self.stuck = True
        return error.again()

    def _post_device(self, operation: Operation, outgoing: Outgoing) -> None:
        payload = self._payload
        if payload is None or not outgoing.device_payload or operation.settled:
            return
        try:
            payload.post(operation, outgoing)
        except Exception as error:
            # The transport may have begun to read it.
            self._stranded.append((operation, outgoing))
            raise self._owner.transport_failed(error) from error

    def _device_failed(self, error: Exception) -> None:
        self._owner.transport_failed(error)

    def withdraw(self, operation: Operation) -> bool:
        """Nothing: what was posted is on its way."""
        return False

    def notice(self, sequence: int) -> None:
        """Complete number `sequence`, and whatever else is posted by now, as soon as it can be.

        All of them, because one wake-up then serves whoever waits for the next.
        """
        if sequence > self._noticed:
            self._noticed = self._sequence - 1

    def wake(self) -> None:
        """Have the driver look at what is to be noticed."""
        self._wake.set()
        self._context.progress.wake(self)

    def steps(self) -> Procedure:
        quiet = 0
        while True:
            while not self._ready:
                if self._abandoned:
                    self._abandoned = False
                    self._post_outbox(None)
                    continue
                if self._finishing and not self._queue:
                    return
                self._wake.clear()
                # Read by posters: only an idle lane has to be woken.  The queue is looked at
                # after it was set, so that a message which saw it unset is not missed.
                self._idle = not self._linger or quiet >= _LINGERS
                if not (self._ready or self._abandoned) and (self._queue or not self._finishing):
                    yield Wait(self._wake, None if self._idle else self._linger * 2**quiet)
                    quiet += 1
            quiet = 0
            self._idle = False
            if self._unnoticed():
                # Cleared before the second look: who asks in between sets it again.
                self._wake.clear()
                if self._unnoticed():
                    yield Wait(self._wake, self._linger)
                # The pause is over and nobody asked: now all that was posted is due.
                if self._unnoticed():
                    self._noticed = self._sequence - 1
            posted = self._queue.popleft()
            self._current = posted.operation
            try:
                while posted.entries:
                    entry = posted.entries.popleft()
                    if self._context.serial:
                        message, tag = entry
                        entry = self._endpoint.isend(message, self.key.peer, tag)
                        del message  # the work keeps what it reads, this frame must not
                    step = NativeWork(self._endpoint, entry)
                    del entry  # the engine holds the step while it waits, and nobody after it
                    yield step
                    del step
            except Exception as error:
                self._failed(error)
                return
            self._current = None
            operation = posted.operation
            del posted  # its messages: they are complete, and what follows may wait long
            self._context.ledger.complete(operation)
            del operation
            yield None

    @property
    def _ready(self) -> bool:
        """Whether the oldest message is posted."""
        return bool(self._queue) and self._queue[0].posted

    def _unnoticed(self) -> bool:
        """Whether nobody asks for the oldest send."""
        return (
            self._linger > 0
            and not self._finishing
            and self._queue[0].operation.sequence > self._noticed
        )

    def fail(self, error: CommError, *, stuck: bool, since: int = 0) -> None:
        """Fail every pending operation of sequence number `since` on, and every later post.

        The transport keeps what it has: the lane holds the buffers until the
        native operations end.  `stuck` says that they may never do so.
        """
        with self._lock:
            if self._error is None:
                self._error = error
            current = self._current
            pending = [current] if current is not None else []
            pending += [posted.operation for posted in self._queue]
            if self._payload is not None:
                pending += [o for o in self._payload.pending if o not in pending]
            pending = [operation for operation in pending if operation.sequence >= since]
            self.stuck |= stuck and bool(pending)
        for operation in pending:
            self._context.ledger.fail(operation, error.again(), quarantine=True)
        self._noticed = self._sequence - 1
        self.wake()

    def refuse(self, error: CommError) -> None:
        """Fail every later post with `error`; what is posted goes on."""
        with self._lock:
            if self._error is None:
                self._error = error

    def finish(self, goodbye: Operation | None, error: CommError) -> None:
        """Refuse every later post with `error`; with `goodbye`, tell the peer's lane so first."""
        with self._lock:
            if self._finishing:
                return
            self._error = self._error or error
            if goodbye is not None:
                self._enqueue(goodbye, self._goodbye())
            self._finishing = True
        if goodbye is not None and self._poster is goodbye:
            self._post_outbox(goodbye)
        self.wake()

    def _goodbye(self) -> list[tuple[Tensor, int]]:
        """The last message, and fillers for everything that the peer has posted ahead."""
        outgoing = plain(Kind.GOODBYE) if self._payload is None else self._payload.goodbye()
        head, _ = outgoing.head(self._sequence, UNPLANNED)
        messages = [(head, self._tag), *_fillers(self._prefetch.headers - 1, self._tag)]
        for slot, count in self._ahead.items():
            messages.extend(_fillers(count, TagMap.payload(self._tag, slot)))
        return messages

    def abandon(self, error: BaseException) -> None:
        self.fail(driver_died(self.name, error), stuck=True)


def _fillers(count: int, tag: int) -> list[tuple[Tensor, int]]:
    return [(torch.zeros(1, dtype=torch.uint8, device="cpu"), tag) for _ in range(count)]
