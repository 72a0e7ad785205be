"""The receiving end of a lane: messages of a peer, checked, matched and handed to claims.

A receive must be posted with the size of its message, which only the header says, and a
posted receive cannot be withdrawn.  So headers have one size and a few receives of them are
always posted; payload is received once its header was read, or ahead of it where its shape
is known.  Messages and claims meet in whichever order they come: what arrives unasked waits
in `_arrived`, what is asked for ahead waits in `_claims`, and one of the two is empty.  At the
end the peer's goodbye, and fillers behind it, complete every receive that is still posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from commlayer.device.payload import ReceivePayload
from commlayer.errors import CommError, ErrorKind, OperationRef, PeerLost
from commlayer.lanes.claims import no_memory, not_built
from commlayer.lanes.context import LaneContext, LaneOwner, driver_died
from commlayer.lanes.headers import HeaderBuffer, PostedHeader
from commlayer.lanes.payload import PayloadReceiver
from commlayer.progress.claim import Claim
from commlayer.progress.interrupts import came_by_signal, interrupted
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.procedure import NativeWork, Procedure, Wait
from commlayer.wire.frame import (
    LONG,
    PREFIX_BYTES,
    UNSLOTTED,
    Kind,
    capacity,
    protocol_error,
)
from commlayer.wire.reader import HeaderReader, Incoming
from commlayer.wire.tags import CONTROL_LANE, TagMap

_VALUES = (Kind.OBJECT, Kind.TENSOR_DICT)


class RecvLane:
    """Takes in the messages of one peer and hands them to claims in order.

    Lanes are independent: one that nobody reads holds up no other.  At most
    ``unclaimed_messages`` complete messages are taken in before they are asked for, beside
    those that fit the header receives posted ahead; payload that is not inline
    is received only when it is asked for, at most one message of each slot ahead.
    """

    def __init__(self, context: LaneContext, owner: LaneOwner, key: LaneKey, tag: int) -> None:
        self.key = key
        self.name = f"recv {key}"
        self._where = OperationRef(f"receive {key}", "receive", key.peer, key.channel, key.tag)
        self._context = context
        self._owner = owner
        self._endpoint = context.endpoint
        self._tag = tag
        self._prefetch = context.prefetch.on(key)
        # A posted receive needs a thread that waits for it, and cannot be withdrawn: lanes of which
        # there may be thousands post none until somebody asks.
        self._on_demand = key.numbered
        # Guards the queues and what ends the lane, so that a message and a claim cannot miss each
        # other.  Nothing native is called and no other lock is taken under it; it comes after the
        # peer's.
        self._lock = context.runtime.lock()
        self._wake = context.runtime.event()
        self._claims: deque[Claim] = deque()
        self._arrived: deque[Incoming] = deque()
        self._current: Claim | None = None
        self._taken = 0
        self._discarding = False
        self._closing = False
        self._error: CommError | None = None
        self._ended = False
        self._posted: deque[PostedHeader] = deque()
        self._payload = PayloadReceiver(
            context.endpoint, self._receive, context.serial, self._where
        )
        device = context.device
        self._reader = HeaderReader(
            context.config,
            self._where,
            self._prefetch.slots,
            None if device is None else device.device.empty,
        )
        self._device_payload = (
            None
            if device is None
            else ReceivePayload(
                device, key, self._match, self._build, self._device_failed, self._lost
            )
        )
        self.stuck = False
        """Whether the lane broke with receives posted that nothing will complete."""

    @property
    def open(self) -> bool:
        """Whether a goodbye is still to come on this lane."""
        return not self._ended

    @property
    def asked(self) -> int:
        """How many messages were asked for, those that have not come included."""
        with self._lock:
            return self._taken + len(self._claims) + (self._current is not None)

    @property
    def taken(self) -> int:
        """How many messages were handed to claims or are here for one."""
        with self._lock:
            return self._taken + len(self._arrived)

    @property
    def unclaimed(self) -> int:
        """How many messages are here that nobody has asked for."""
        with self._lock:
            return len(self._arrived)

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked for what comes next, or the lane is to end."""
        return bool(self._claims) or self._current is not None or self._discarding or self._closing

    def withdraw(self, operation: Operation) -> bool:
        """Take back the receive of `operation`, unless a message was matched to it."""
        with self._lock:
            claim = next((c for c in self._claims if c.operation is operation), None)
            if claim is None:
                return False
            self._claims.remove(claim)
        return self._context.ledger.fail(
            operation,
            CommError(
                ErrorKind.CANCELLED,
                operation,
                "it was withdrawn before a message came",
                "The next receive gets the message",
            ),
        )

    def notice(self, sequence: int) -> None:
        """Nothing: what was claimed is received as soon as it comes."""

    def wake(self) -> None:
        """Have the driver look at what the lane is asked for."""
        self._wake.set()
        self._context.progress.wake(self)

    def claim(self, claim: Claim) -> None:
        """Ask for the next message; the operation settles when it is here or cannot come."""
        incoming: Incoming | None = None
        left: Incoming | None = None
        error: CommError | None = None
        # Before the claim counts: without a driver nothing would ever be received for it.
        self._context.progress.start(self)
        if self._device_payload is not None and claim.at_most > 0 and self._error is None:
            self._device_payload.post_ahead(claim.at_most)
        try:
            with self._lock:
                if self._arrived and claim.leaves(self._arrived[0]):
                    left = self._arrived[0]
                elif self._arrived:
                    incoming = self._arrived[0]
                    self._taken += 1
                    self._arrived.popleft()
                    claim.operation.driven = self
                    if self._device_payload is not None:
                        if self._device_payload.defer(claim, incoming):
                            incoming = None
                        self._device_payload.defer_goodbye(self._arrived)
                elif self._error is not None:
                    error = self._error.again()
                else:
                    claim.operation.driven = self
                    self._claims.append(claim)
            if left is not None:
                self._match(claim, left)
            elif incoming is not None:
                self._settle(claim, incoming)
            elif error is not None:
                self._context.ledger.fail(claim.operation, error)
                return
            self.wake()
        except BaseException:
            self.take_back(claim, incoming)
            raise

    def take_back(self, claim: Claim, incoming: Incoming | None = None) -> None:
        """Undo a claim of which nobody has the handle, unless it has been served.

        `incoming` is the message that it was being served with.
        """
        operation = claim.operation
        with self._lock:
            if claim in self._claims:
                self._claims.remove(claim)
                operation.driven = None
            elif incoming is not None and not operation.settled:
                if not (self._arrived and self._arrived[0] is incoming):
                    self._arrived.appendleft(incoming)
                    self._taken -= 1
                operation.driven = None

    def steps(self) -> Procedure:
        try:
            inline_bytes = 0 if self.key.name == CONTROL_LANE else self._context.config.inline_bytes
            if not self._on_demand:
                for _ in range(self._prefetch.headers):
                    self._post_header(HeaderBuffer(capacity(inline_bytes)))
            while True:
                if self._on_demand:
                    yield from self._until_wanted()
                    self._post_header(HeaderBuffer(capacity(inline_bytes)))
                header, work = self._posted[0]
                yield NativeWork(self._endpoint, work)
                del work  # it keeps the header's buffer, which is posted again
                self._posted.popleft()
                incoming = yield from self._read(header)
                if incoming is None:
                    yield from self._take_fillers()
                    self._end()
                    return
                claim = None
                if incoming.schema.payload:
                    claim = yield from self._next_claim(incoming)
                    accepts = claim is not None and self._match(claim, incoming)
                    yield from self._payload.receive(incoming, claim if accepts else None)
                self._hand_over(incoming, claim)
                schema, slot = incoming.schema, incoming.slot
                # The receiver owns the result from here on: this frame would keep it until the
                # next message.
                del incoming, claim
                yield None
                yield from self._payload.throw_away_owed()
                if slot > UNSLOTTED:
                    self._payload.post_ahead(schema, slot)
                self._reader.prepare(schema)
                yield from self._throttle()
                if not self._on_demand:
                    self._post_header(header)
                del header, schema
        except CommError as error:
            self._break(error)
        except MemoryError:
            self._break(protocol_error(self._where, "this rank has no memory to read a header"))
        except Exception as error:
            if came_by_signal(error):
                self._break(interrupted(self.name, error))
            else:
                self._owner.transport_failed(error)

    def _post_header(self, header: HeaderBuffer) -> None:
        self._posted.append(PostedHeader(header, self._receive(header.tensor, 0)))

    def _receive(self, buffer: Tensor, slot: int) -> Any:
        return self._endpoint.irecv(buffer, self.key.peer, TagMap.payload(self._tag, slot))

    def _read(self, header: HeaderBuffer) -> Generator[NativeWork | Wait, None, Incoming | None]:
        """Read what arrived; ``None`` for a goodbye."""
        prefix = self._reader.prefix(header.view)
        end = PREFIX_BYTES
        if prefix.flags & LONG:
            rest = bytearray(prefix.body)
            with torch.inference_mode(False):
                tensor = torch.frombuffer(rest, dtype=torch.uint8)
            yield NativeWork(self._endpoint, self._receive(tensor, UNSLOTTED))
            data = memoryview(rest)
        else:
            end += prefix.body
            data = header.view[PREFIX_BYTES:end]
        incoming = self._reader.message(prefix, data)
        if prefix.kind is Kind.GOODBYE:
            if self._device_payload is not None:
                with self._lock:
                    self._device_payload.say_goodbye(incoming)
                    self._device_payload.defer_goodbye(self._arrived)
            return None
        if self._device_payload is not None and incoming.schema.reserved:
            self._device_payload.declare(incoming.schema, self._where)
        self._reader.unpack(incoming, header.address + end)
        return incoming

    def _take_fillers(self) -> Procedure:
        """Complete every receive that was posted ahead, and what payload is left."""
        yield from self._payload.end()
        while self._posted:
            yield NativeWork(self._endpoint, self._posted[0].work)
            self._posted.popleft()

    def _until_wanted(self) -> Generator[Wait, None, None]:
        while not self.wanted:
            self._wake.clear()
            if not self.wanted:
                yield Wait(self._wake)

    def _throttle(self) -> Generator[Wait, None, None]:
        while True:
            with self._lock:
                free = len(self._arrived) < self._context.config.unclaimed_messages
                if free or self._discarding or self._closing:
                    return
                self._wake.clear()
            yield Wait(self._wake)

    def _next_claim(self, incoming: Incoming) -> Generator[Wait, None, Claim | None]:
        """Wait for a claim that does not leave `incoming`; ``None`` if messages are thrown away."""
        while True:
            with self._lock:
                self._current = claim = self._claims.popleft() if self._claims else None
                if claim is None:
                    if self._discarding:
                        return None
                    self._wake.clear()
            if claim is None:
                yield Wait(self._wake)
            elif claim.leaves(incoming):
                self._match(claim, incoming)
            else:
                return claim

    def _hand_over(self, incoming: Incoming, claim: Claim | None = None) -> None:
        leaving: list[Claim] = []
        with self._lock:
            self._current = None
            if not self._discarding:
                while claim is None and self._claims:
                    claim = self._claims.popleft()
                    if claim.leaves(incoming):
                        leaving.append(claim)
                        claim = None
                if claim is None:
                    self._arrived.append(incoming)
            here = claim is not None or self._discarding
            self._taken += claim is not None
            if here and self._device_payload is not None:
                here = not self._device_payload.defer(claim, incoming)
        for refused in leaving:
            self._match(refused, incoming)
        if here and claim is not None:
            self._settle(claim, incoming)

    def _settle(self, claim: Claim, incoming: Incoming) -> None:
        if self._match(claim, incoming):
            self._context.ledger.complete(claim.operation, self._build(claim, incoming))

    def _match(self, claim: Claim, incoming: Incoming) -> bool:
        """Whether `claim` takes `incoming`; one that does not fails, and the message is lost.

        The claim decides once, when the two meet: before payload is received, if there is any.
        """
        operation = claim.operation
        if operation.settled:
            return False
        if operation.sequence < 0:
            operation.sequence = incoming.sequence
            self._context.ledger.matched(operation)
            error = claim.refusal(incoming)
            if error is not None:
                self._context.ledger.fail(operation, error)
                return False
        if incoming.lost_bytes:
            self._context.ledger.fail(operation, no_memory(operation, incoming.lost_bytes))
            return False
        operation.nbytes = incoming.nbytes
        return True

    def _device_failed(self, error: Exception) -> None:
        self._owner.transport_failed(error)

    def _lost(self, claim: Claim, error: Exception) -> None:
        self._context.ledger.fail(claim.operation, self._owner.transport_failed(error))

    def _build(self, claim: Claim, incoming: Incoming) -> Any:
        """What `claim` yields; where that cannot be made, its operation fails."""
        operation = claim.operation
        try:
            return claim.value(incoming)
        except CommError as failure:
            self._context.ledger.fail(operation, failure)
        except Exception as failure:
            self._context.ledger.fail(operation, not_built(operation, failure))
        return None

    def _end(self) -> None:
        self._ended = True
        error = self._owner.error
        if not isinstance(error, PeerLost):
            error = CommError(
                ErrorKind.CLOSED,
                self._where,
                f"rank {self.key.peer} has closed its communicator and sends no more",
                "Receive everything before the peer closes",
            )
        self.fail(error)

    def _break(self, error: CommError) -> None:
        """End the lane: what comes next on it cannot be told apart from what went wrong."""
        self._ended = True
        cure = f"{error.cure}; this lane has ended: nothing more is received on it"
        error = CommError(error.kind, error.about or error.operation, error.cause, cure)
        self.stuck = bool(self._posted) or self._payload.pending
        self.fail(error)
        self._owner.lane_broken(self.key, error)

    def fail(self, error: CommError) -> None:
        """Fail every claim, now and later; messages that are here already can still be claimed."""
        with self._lock:
            if self._error is None:
                self._error = error
            claims = list(self._claims)
            self._claims.clear()
            current = self._current
        if current is not None:
            self._context.ledger.fail(current.operation, error.again(), quarantine=True)
        for claim in claims:
            self._context.ledger.fail(claim.operation, error.again())

    def expect_goodbye(self) -> None:
        """Take in whatever comes until the goodbye, however much is unclaimed."""
        with self._lock:
            self._closing = True
        self.wake()

    def discard(self, error: CommError) -> None:
        """Fail every claim with `error` and throw away what comes from now on until the goodbye.

        Messages that are here already can still be claimed, those with payload on
        a device excepted.
        """
        self.fail(error)
        with self._lock:
            self._discarding = True
            if self._device_payload is not None:
                self._discard_arrived(self._device_payload)
        self.wake()

    def _discard_arrived(self, payload: ReceivePayload) -> None:
        """Throw away what arrived, from the first message with payload on a device on."""
        first = next((n for n, i in enumerate(self._arrived) if i.schema.on_device), None)
        if first is not None:
            while len(self._arrived) > first:
                payload.defer(None, self._arrived[first])
                del self._arrived[first]
        payload.defer_goodbye(self._arrived)

    def abandon(self, error: BaseException) -> None:
        self._break(driver_died(self.name, error))
