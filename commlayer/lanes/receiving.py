"""The receiving end of a lane: messages of a peer, checked, matched and handed to claims."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Generator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind, Subject
from commlayer.lanes.context import LaneContext, driver_died, reserved_key
from commlayer.lanes.incoming import Claim, Incoming
from commlayer.lanes.payload import PayloadReceiver
from commlayer.progress.engine import NativeWork, Procedure
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.runtime import Event
from commlayer.wire.frame import (
    LOOSE,
    PREFIX_BYTES,
    Body,
    Kind,
    Placement,
    Prefix,
    capacity,
    check_body,
    decode_body,
    decode_prefix,
    protocol_error,
)
from commlayer.wire.schemas import ReceivedSchemas, Schema, is_named
from commlayer.wire.tags import CONTROL_LANE, TagMap
from commlayer.wire.tensors import DTYPES, as_bytes
from commlayer.wire.values import Parsed, parse

_VALUES = (Kind.OBJECT, Kind.TENSOR_DICT)


class _Header:
    """A buffer for one header message, posted again and again.

    A message may be shorter than a header.  What the buffer holds behind it is then
    the header before, whose sequence number is over, or at first nothing.
    """

    __slots__ = ("address", "tensor", "view")

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty((size,), dtype=torch.uint8, device="cpu")
            self.tensor[:PREFIX_BYTES].zero_()
        self.address = self.tensor.data_ptr()
        self.view = memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")


class _PostedHeader(NamedTuple):
    header: _Header
    work: Any


class RecvLane:
    """Takes in the messages of one peer and hands them to claims in order.

    Lanes are independent: one that nobody reads holds up no other.  At most
    `unclaimed` complete messages are taken in before they are asked for, beside
    those that fit the header receives posted ahead; payload that is not inline
    is received only when it is asked for, at most one message of each slot ahead.

    A claim that declares a size posts its device receive at once, once a message
    has shown that the peer declares the same.  The payloads of such messages have
    that size and a device lane of their own, so whichever of them is next will
    fill it.  One receive is posted ahead of its header at a time.
    """

    def __init__(self, context: LaneContext, endpoint: Endpoint, key: LaneKey, tag: int) -> None:
        self.key = key
        self.name = f"recv {key}"
        self._where = Subject.of(
            f"receive {key}",
            call="receive",
            peer=key.peer,
            channel=key.channel,
            tag=key.tag,
            sequence=-1,
            nbytes=0,
        )
        self._context = context
        self._endpoint = endpoint
        self._tag = tag
        self._posting_ahead = context.ahead.on(key)
        self._lock = context.runtime.lock()
        self._wake = context.runtime.event()
        self._claims: deque[Claim] = deque()
        self._arrived: deque[Incoming] = deque()
        self._deferred: deque[tuple[Claim | None, Incoming]] = deque()
        self._current: Claim | None = None
        self._reserved = 0
        self._ahead: Tensor | None = None
        self._goodbye: Incoming | None = None
        self._expected = 0
        self._taken = 0
        self._sinking = False
        self._unthrottled = False
        self._error: CommError | None = None
        self._ended = False
        self._posted: deque[_PostedHeader] = deque()
        self._schemas = ReceivedSchemas()
        self._payload = PayloadReceiver(endpoint, self._receive, context.serial, self._where)
        self._fresh: tuple[Schema, list[Tensor | None]] | None = None
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
    def wanted(self) -> bool:
        """Whether somebody has asked for what comes next, or the lane is to end."""
        return bool(self._claims) or self._current is not None or self._sinking or self._unthrottled

    def start(self) -> None:
        """Post the first header receives.  Called once."""
        self._context.progress.start(self)

    def attend(self, operation: Operation) -> None:
        """Nothing: what was claimed is received as soon as it comes."""

    def hurry(self) -> None:
        """Nothing: see `attend`."""

    def claim(self, claim: Claim) -> None:
        """Ask for the next message; the operation settles when it is here or cannot come."""
        incoming: Incoming | None = None
        error: CommError | None = None
        claim.operation.driven = self
        if claim.at_most > 0:
            self._post_ahead(claim.at_most)
        with self._lock:
            if self._arrived:
                incoming = self._arrived.popleft()
                self._taken += 1
                if self._defer(claim, incoming):
                    incoming = None
                self._defer_goodbye()
            elif self._error is not None:
                error = self._error.again()
            else:
                self._claims.append(claim)
        if incoming is not None:
            self._settle(claim, incoming)
        elif error is not None:
            self._context.ledger.fail(claim.operation, error)
            return
        self._wake.set()
        self._context.progress.nudge(self)

    def _post_ahead(self, size: int) -> None:
        """Post the device receive of the next reserved message before its header is here."""
        device = self._context.device
        if device is None or device.capture_refused():
            return
        try:
            with device.lock:
                if size == self._reserved and self._ahead is None and self._error is None:
                    with torch.inference_mode(False):
                        buffer = device.device.empty((size,), torch.uint8)
                    self._receive_reserved(device, "receive posted ahead", buffer)
                    self._ahead = buffer
        except Exception as error:
            self._device_failed(error)

    def _receive_reserved(self, device: DeviceSide, kind: str, buffer: Tensor) -> None:
        operation = Operation(kind, self.key, 0, self._context.runtime.now())
        lane = device.lane(reserved_key(self.key), self._device_failed)
        lane.receive(operation, [buffer], lambda: None)

    def steps(self) -> Procedure:
        try:
            inline_bytes = 0 if self.key.name == CONTROL_LANE else self._context.inline_bytes
            for _ in range(self._posting_ahead.headers):
                self._post_header(_Header(capacity(inline_bytes)))
            while True:
                header, work = self._posted[0]
                yield NativeWork(self._endpoint, work)
                del work
                self._posted.popleft()
                incoming = yield from self._read(header)
                if incoming is None:
                    yield from self._take_fillers()
                    self._end()
                    return
                claim = None
                if incoming.schema.payload:
                    claim = yield from self._next_claim()
                    yield from self._payload.receive(incoming, claim)
                self._hand_over(incoming, claim)
                schema, slot = incoming.schema, incoming.slot
                del incoming, claim
                yield None
                yield from self._payload.throw_away_owed()
                if slot > LOOSE:
                    self._payload.post_ahead(schema, slot)
                self._fresh = self._made_ahead(schema)
                yield from self._throttle()
                self._post_header(header)
        except CommError as error:
            self._break(error)
        except MemoryError:
            self._break(protocol_error(self._where, "this rank has no memory to read a header"))
        except Exception as error:
            self._context.peer_failed(self.key.peer, error)

    def _post_header(self, header: _Header) -> None:
        self._posted.append(_PostedHeader(header, self._receive(header.tensor, 0)))

    def _receive(self, buffer: Tensor, slot: int) -> Any:
        return self._endpoint.irecv(buffer, self.key.peer, TagMap.payload(self._tag, slot))

    def _read(self, header: _Header) -> Generator[NativeWork | Event, None, Incoming | None]:
        """Decode what arrived; ``None`` for a goodbye."""
        limits, where = self._context.limits, self._where
        prefix = decode_prefix(header.view, limits, where)
        if prefix.sequence != self._expected:
            raise protocol_error(
                where, f"message {prefix.sequence} arrived, {self._expected} was expected"
            )
        self._expected += 1
        end = PREFIX_BYTES
        if prefix.long:
            rest = bytearray(prefix.body)
            with torch.inference_mode(False):
                tensor = torch.frombuffer(rest, dtype=torch.uint8)
            yield NativeWork(self._endpoint, self._receive(tensor, LOOSE))
            data = memoryview(rest)
        else:
            end += prefix.body
            data = header.view[PREFIX_BYTES:end]
        incoming = self._decode(prefix, data)
        if prefix.kind is Kind.GOODBYE:
            with self._lock:
                self._goodbye = incoming
                self._defer_goodbye()
            return None
        self._check(prefix, incoming)
        self._unpack_inline(incoming, header.address + end)
        return incoming

    def _decode(self, prefix: Prefix, data: memoryview) -> Incoming:
        limits, where = self._context.limits, self._where
        if is_named(prefix):
            check_body(prefix, data, where)
            schema = self._schemas.named(prefix, where)
            if schema.kind not in _VALUES:
                return Incoming(prefix, schema, None)
            if prefix.body:
                return Incoming(prefix, schema, self._parse(schema.body, data))
            known = schema.reusable or self._parse(schema.body, schema.body.value)
            return Incoming(prefix, schema, known)
        body = decode_body(prefix, data, limits, where)
        parsed = self._parse(body, body.value) if prefix.kind in _VALUES else None
        reusable = parsed if parsed is not None and parsed.reusable else None
        schema = Schema(prefix.kind, body, reusable)
        if prefix.schema:
            self._schemas.define(prefix.schema, schema)
        return Incoming(prefix, schema, parsed)

    def _parse(self, body: Body, value: bytes | memoryview) -> Parsed:
        return parse(value, len(body.tensors), self._context.limits, self._where)

    def _check(self, prefix: Prefix, incoming: Incoming) -> None:
        """Raise `CommError` (PROTOCOL) unless the message can be received here."""
        schema, where = incoming.schema, self._where
        if schema.kind is Kind.TENSOR and len(schema.body.tensors) != 1:
            raise protocol_error(where, "a tensor message must carry one tensor")
        if self._context.device is None and schema.on_device:
            raise protocol_error(where, "the message has device payload, this rank has no device")
        if bool(prefix.slot) != bool(schema.payload) or (
            prefix.slot > LOOSE
            and not (schema.may_have_slot and prefix.slot <= LOOSE + self._posting_ahead.slots)
        ):
            raise protocol_error(where, f"the message may not use payload slot {prefix.slot}")
        if schema.reserved:
            if self._reserved not in (0, schema.body.at_most):
                raise protocol_error(
                    where,
                    f"{schema.body.at_most} bytes are declared, and were {self._reserved} before",
                )
            self._reserved = schema.body.at_most

    @staticmethod
    def _made_ahead(schema: Schema) -> tuple[Schema, list[Tensor | None]] | None:
        """Memory for the next message of `schema`, made while nobody waits for it."""
        tensors = schema.allocate() if schema.inline else None
        return None if tensors is None else (schema, tensors)

    def _unpack_inline(self, incoming: Incoming, address: int) -> None:
        """Copy what travelled in the header out of it, so that its buffer can be posted again."""
        schema = incoming.schema
        tensors: list[Tensor | None] | None
        if self._fresh is not None and self._fresh[0] is schema:
            tensors, self._fresh = self._fresh[1], None
        else:
            tensors = schema.allocate()
        if tensors is None:
            incoming.lost_bytes = max(1, schema.inline)
            incoming.tensors = [None] * len(schema.parts)
            return
        incoming.tensors = tensors
        if schema.inline:
            for tensor, (_, _, nbytes, place) in zip(tensors, schema.parts, strict=True):
                if place == Placement.INLINE:
                    assert tensor is not None
                    ctypes.memmove(tensor.data_ptr(), address, nbytes)
                    address += nbytes

    def _take_fillers(self) -> Procedure:
        """Complete every receive that was posted ahead, and what payload is left."""
        yield from self._payload.end()
        while self._posted:
            yield NativeWork(self._endpoint, self._posted[0].work)
            self._posted.popleft()

    def _throttle(self) -> Generator[Event, None, None]:
        while True:
            with self._lock:
                free = len(self._arrived) < self._context.unclaimed
                if free or self._sinking or self._unthrottled:
                    return
                self._wake.clear()
            yield self._wake

    def _next_claim(self) -> Generator[Event, None, Claim | None]:
        """Wait for a claim; ``None`` when messages are thrown away."""
        while True:
            with self._lock:
                if self._claims:
                    self._current = self._claims.popleft()
                    return self._current
                if self._sinking:
                    return None
                self._wake.clear()
            yield self._wake

    def _hand_over(self, incoming: Incoming, claim: Claim | None = None) -> None:
        with self._lock:
            self._current = None
            if claim is None and not self._sinking:
                if not self._claims:
                    self._arrived.append(incoming)
                    return
                claim = self._claims.popleft()
            if claim is not None:
                self._taken += 1
            if self._defer(claim, incoming):
                return
        if claim is not None:
            self._settle(claim, incoming)

    def _settle(self, claim: Claim, incoming: Incoming) -> None:
        if not self._refused(claim, incoming):
            self._context.ledger.complete(claim.operation, self._build(claim, incoming))

    def _defer(self, claim: Claim | None, incoming: Incoming) -> bool:
        """Leave a message with device payload to `advance`.  Called under the lock."""
        device = self._context.device
        if device is None or not incoming.on_device:
            return False
        self._deferred.append((claim, incoming))
        device.postpone(self)
        return True

    def _defer_goodbye(self) -> None:
        """Leave what ends a receive posted ahead to `advance`, behind every message before it."""
        if self._goodbye is not None and not any(i.on_device for i in self._arrived):
            self._defer(None, self._goodbye)
            self._goodbye = None

    def _refused(self, claim: Claim, incoming: Incoming) -> bool:
        operation = claim.operation
        if operation.settled:
            return True
        operation.sequence = incoming.sequence
        self._context.ledger.matched(operation)
        error = claim.refusal(incoming)
        if error is None and incoming.lost_bytes:
            error = _no_memory(operation, incoming.lost_bytes)
        if error is not None:
            self._context.ledger.fail(operation, error)
        return error is not None

    def advance(self) -> None:
        """Post the device receives of messages that were claimed, in the order of the lane.

        Called under the device's lock.
        """
        device = self._context.device
        assert device is not None
        while self._deferred:
            self._receive_on(device, *self._deferred[0])
            self._deferred.popleft()

    def post_failed(self, error: Exception) -> None:
        """Fail what could not be received: its peer is lost."""
        lost = self._context.peer_failed(self.key.peer, error)
        with self._lock:
            deferred = list(self._deferred)
            self._deferred.clear()
        for claim, _ in deferred:
            if claim is not None:
                self._context.ledger.fail(claim.operation, lost.again())

    def _receive_on(self, device: DeviceSide, claim: Claim | None, incoming: Incoming) -> None:
        if claim is not None and self._refused(claim, incoming):
            claim = None
        if incoming.schema.reserved:
            self._receive_at_most(device, claim, incoming)
            return
        lane = device.lane(self.key, self._device_failed)
        buffers = []
        for index in incoming.placed(Placement.DEVICE):
            meta = incoming.body.tensors[index]
            buffer = None if claim is None else claim.buffer(incoming, index)
            if buffer is None:
                with torch.inference_mode(False):
                    fresh = device.device.empty(meta.shape, DTYPES[meta.dtype])
                incoming.tensors[index] = fresh
                buffer = as_bytes(fresh)
            buffers.append(buffer)
        if claim is None:
            operation = Operation("discarded receive", self.key, 0, self._context.runtime.now())
            lane.receive(operation, buffers, lambda: None)
        else:
            operation = claim.operation
            operation.received = buffers
            lane.receive(operation, buffers, lambda: self._build(claim, incoming))

    def _receive_at_most(self, device: DeviceSide, claim: Claim | None, incoming: Incoming) -> None:
        """As `_receive_on`, for a reserved message: its receive may be posted already."""
        buffer, self._ahead = self._ahead, None
        body = incoming.body
        if incoming.kind is Kind.GOODBYE:
            self._reserved = 0
        if buffer is None:
            with torch.inference_mode(False):
                buffer = device.device.empty((body.at_most,), torch.uint8)
            self._receive_reserved(device, "receive of a declared size", buffer)
        if claim is None:
            return
        meta = body.tensors[0]
        with torch.inference_mode(False):
            part = buffer[: meta.nbytes].view(DTYPES[meta.dtype])
            incoming.tensors[0] = part.view(meta.shape)
        claim.operation.received = [buffer]
        lane = device.lane(reserved_key(self.key), self._device_failed)
        lane.receive(claim.operation, (), lambda: self._build(claim, incoming))

    def _device_failed(self, error: Exception) -> None:
        self._context.peer_failed(self.key.peer, error)

    def _build(self, claim: Claim, incoming: Incoming) -> Any:
        """What `claim` yields; where that cannot be made, its operation fails."""
        operation = claim.operation
        try:
            return claim.value(incoming)
        except CommError as failure:
            self._context.ledger.fail(operation, failure)
        except Exception as failure:
            self._context.ledger.fail(
                operation,
                CommError(
                    ErrorKind.PROTOCOL,
                    operation.describe(),
                    f"the value cannot be built ({type(failure).__name__}: {failure})",
                    "See the cause; this message is lost, later ones are not",
                ),
            )
        return None

    def _end(self) -> None:
        self._ended = True
        self.fail(
            CommError(
                ErrorKind.CLOSED,
                self._where,
                f"rank {self.key.peer} has closed its communicator and sends no more",
                "Receive everything before the peer closes",
            )
        )

    def _break(self, error: CommError) -> None:
        """End the lane: what comes next on it cannot be told apart from what went wrong."""
        self._ended = True
        cure = f"{error.cure}; this lane has ended: nothing more is received on it"
        error = CommError(error.kind, error.operation, error.cause, cure)
        self.stuck = bool(self._posted) or self._payload.pending
        self.fail(error)
        self._context.lane_broken(self.key, error)

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
            self._unthrottled = True
        self._wake.set()
        self._context.progress.nudge(self)

    def sink(self, error: CommError) -> None:
        """Fail every claim with `error` and throw away what comes from now on until the goodbye.

        Messages that are here already can still be claimed, those with payload on
        a device excepted.
        """
        self.fail(error)
        with self._lock:
            self._sinking = True
            self._discard_arrived()
        self._wake.set()
        self._context.progress.nudge(self)

    def _discard_arrived(self) -> None:
        """Throw away what arrived, from the first message with payload on a device on."""
        first = next((n for n, i in enumerate(self._arrived) if i.on_device), None)
        if first is not None:
            while len(self._arrived) > first:
                self._defer(None, self._arrived[first])
                del self._arrived[first]
        self._defer_goodbye()

    def abandon(self, error: BaseException) -> None:
        self._break(driver_died(self.name, error))


def _no_memory(operation: Operation, nbytes: int) -> CommError:
    return CommError(
        ErrorKind.PROTOCOL,
        operation.describe(),
        f"this rank has no memory for {nbytes} bytes of the message",
        "Send less at once, or receive into memory that is there; this message is lost, later ones "
        "are not",
    )
