"""Lanes: one FIFO of messages between this rank and a peer, in one direction.

A send lane posts messages and completes their operations in order.  A receive
lane keeps a header receive posted, checks what arrives, matches it with the
receives that were asked for, and only then posts receives for the payload.
Both are procedures that a progress engine drives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.errors import CommError, ErrorKind
from commlayer.streams.side import DeviceSide
from commlayer.tracking.ledger import Ledger
from commlayer.tracking.operation import LaneKey, Operation
from commlayer.tracking.progress import NativeWork, Procedure, ProgressEngine
from commlayer.tracking.retention import DeviceHold
from commlayer.tracking.runtime import Event, Runtime
from commlayer.wire.frame import (
    PREFIX_BYTES,
    Body,
    Kind,
    Outgoing,
    Placement,
    capacity,
    decode_body,
    decode_prefix,
    protocol_error,
)
from commlayer.wire.tags import RESERVED
from commlayer.wire.tensors import DTYPES, Limits, TensorMeta, as_bytes, from_meta
from commlayer.wire.values import Parsed, parse


@dataclass(frozen=True)
class LaneContext:
    """What all lanes of one connection share.

    `serial` lanes have one native operation outstanding at a time and post from
    their driver, never from the caller.  `peer_failed` is told of a native
    error, `lane_broken` of a message that cannot be trusted.
    """

    runtime: Runtime
    ledger: Ledger
    progress: ProgressEngine
    limits: Limits
    inline_bytes: int
    unclaimed: int
    serial: bool
    peer_failed: Callable[[int, Exception], CommError]
    lane_broken: Callable[[LaneKey, CommError], None]
    device: DeviceSide | None = None


class _Posted(NamedTuple):
    """A message on its way: what is still to be completed, and what must live until then.

    `entries` are native works, or on serial lanes the messages still to be posted.
    """

    operation: Operation
    entries: deque[Any]
    messages: Sequence[Tensor]


class SendLane:
    """Posts messages to one peer and completes them in order.

    `post` may be called from any thread; the order of what several threads
    post is theirs to fix.
    """

    def __init__(self, context: LaneContext, endpoint: Endpoint, key: LaneKey, tag: int) -> None:
        self.key = key
        self.name = f"send {key}"
        self._context = context
        self._endpoint = endpoint
        self._tag = tag
        self._lock = context.runtime.lock()
        self._wake = context.runtime.event()
        self._queue: deque[_Posted] = deque()
        self._stranded: list[Any] = []
        self._on_device: list[Operation] = []
        self._current: Operation | None = None
        self._sequence = 0
        self._reserved = 0
        self._started = False
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
            or not all(operation.device_done for operation in list(self._on_device))
        )

    @property
    def used(self) -> bool:
        """Whether a message was posted."""
        return self._sequence > 0

    def post(self, operation: Operation, outgoing: Outgoing) -> None:
        """Post `outgoing`; `operation` completes when the transport has let go of its buffers.

        Raises the lane's error if it has failed, and what posting raises.
        """
        with self._lock:
            if self._error is not None:
                raise self._error.again()
            failure = self._enqueue(operation, outgoing)
        self._posted(failure)

    def _enqueue(self, operation: Operation, outgoing: Outgoing) -> Exception | None:
        operation.sequence = self._sequence
        messages = outgoing.messages(self._sequence)
        operation.retained = messages
        failure, entries = self._post_all(operation, messages)
        if failure is None:
            failure = self._post_device(operation, outgoing)
        if failure is None:
            self._sequence += 1
            self._queue.append(_Posted(operation, entries, messages))
        return failure

    def _post_device(self, operation: Operation, outgoing: Outgoing) -> Exception | None:
        device = self._context.device
        if device is None or not outgoing.device_payload:
            return None
        operation.parts = 2
        operation.works = ()
        operation.host_payload = bool(outgoing.payload)
        if operation.device_hold is not DeviceHold.POST:
            operation.device_buffers = outgoing.device_payload
        self._on_device = [o for o in self._on_device if not o.device_done]
        self._on_device.append(operation)
        try:
            with device.lock:
                key = self.key
                if outgoing.reserved:
                    key = reserved_key(key)
                    self._reserved = outgoing.device_payload[0].numel()
                device.lane(key, self._device_failed).send(operation, outgoing.device_payload)
        except Exception as error:
            self._stranded.append((operation, outgoing))
            return error
        return None

    def advance(self) -> None:
        """Post the last reserved payload, for a receive that the peer has posted ahead.

        Called under the device's lock.
        """
        device = self._context.device
        assert device is not None
        with torch.inference_mode(False):
            padding = device.device.empty((self._reserved,), torch.uint8)
        operation = Operation("last payload", self.key, 0, self._context.runtime.now())
        operation.device_buffers = (padding,)
        device.lane(reserved_key(self.key), self._device_failed).send(operation, (padding,))

    def post_failed(self, error: Exception) -> None:
        self._context.peer_failed(self.key.peer, error)

    def _device_failed(self, error: Exception) -> None:
        self._context.peer_failed(self.key.peer, error)

    def _posted(self, failure: Exception | None) -> None:
        if failure is not None:
            raise self._context.peer_failed(self.key.peer, failure) from failure
        self._wake.set()
        with self._lock:
            start, self._started = not self._started, True
        if start:
            self._context.progress.start(self)

    def _post_all(
        self, operation: Operation, messages: Sequence[Tensor]
    ) -> tuple[Exception | None, deque[Any]]:
        if self._context.serial:
            return None, deque(messages)
        works: deque[Any] = deque()
        try:
            for message in messages:
                works.append(self._endpoint.isend(message, self.key.peer, self._tag))
        except Exception as error:
            self._stranded.append((messages, works))
            return error, works
        operation.works = tuple((self._endpoint, work) for work in works)
        return None, works

    def steps(self) -> Procedure:
        while True:
            while not self._queue:
                if self._finishing:
                    return
                self._wake.clear()
                if not self._queue and not self._finishing:
                    yield self._wake
            posted = self._queue.popleft()
            self._current = posted.operation
            try:
                while posted.entries:
                    entry = posted.entries.popleft()
                    if self._context.serial:
                        entry = self._endpoint.isend(entry, self.key.peer, self._tag)
                    step = NativeWork(self._endpoint, entry)
                    del entry
                    yield step
                    del step
            except Exception as error:
                self._context.peer_failed(self.key.peer, error)
                return
            self._current = None
            operation = posted.operation
            del posted
            self._context.ledger.complete(operation)
            del operation

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
            pending += [o for o in self._on_device if not o.device_done and o not in pending]
            pending = [operation for operation in pending if operation.sequence >= since]
            self.stuck |= stuck and bool(pending)
        for operation in pending:
            self._context.ledger.fail(operation, error.again(), quarantine=True)

    def refuse(self, error: CommError) -> None:
        """Fail every later post with `error`; what is posted goes on."""
        with self._lock:
            if self._error is None:
                self._error = error

    def finish(self, goodbye: Operation | None, error: CommError) -> None:
        """Refuse every later post with `error`; with `goodbye`, tell the peer's lane so first."""
        failure = None
        with self._lock:
            if self._finishing:
                return
            self._error = self._error or error
            if goodbye is not None:
                failure = self._enqueue(goodbye, self._goodbye())
            self._finishing = True
        self._posted(failure)

    def _goodbye(self) -> Outgoing:
        """Where a receive may be posted ahead, it announces the payload that ends that one."""
        device = self._context.device
        if device is None or not self._reserved:
            return Outgoing(Kind.GOODBYE, (), b"", 0)
        device.postpone(self)
        nothing = torch.empty(0, dtype=torch.uint8)
        return Outgoing(Kind.GOODBYE, (nothing,), b"", 0, at_most=self._reserved, reserved=())

    def abandon(self, error: BaseException) -> None:
        self.fail(_driver_died(self.name, error), stuck=True)


class Incoming:
    """A message whose header was checked.

    `tensors` are those that are here: payload that a claim received into its
    own memory stays ``None``.
    """

    __slots__ = ("body", "kind", "parsed", "sequence", "tensors")

    def __init__(self, kind: Kind, sequence: int, body: Body, parsed: Parsed | None) -> None:
        self.kind = kind
        self.sequence = sequence
        self.body = body
        self.parsed = parsed
        self.tensors: list[Tensor | None] = []

    def placed(self, where: Placement) -> list[int]:
        """Indices of the tensors that travel as `where` says."""
        return [index for index, place in enumerate(self.body.placements) if place == where]

    @property
    def on_device(self) -> bool:
        """Whether it has payload on the device transport."""
        return any(place >= Placement.DEVICE for place in self.body.placements)


class Claim(Protocol):
    """A receive that was asked for."""

    @property
    def operation(self) -> Operation: ...

    @property
    def at_most(self) -> int:
        """The size in bytes that was declared for its tensor; -1 if none was."""
        ...

    def refusal(self, incoming: Incoming) -> CommError | None:
        """Why `incoming` is not what was asked for, or ``None``."""
        ...

    def buffer(self, incoming: Incoming, index: int) -> Tensor | None:
        """Memory (1-D uint8, of exactly its size) to receive tensor `index` into, or ``None``."""
        ...

    def value(self, incoming: Incoming) -> Any:
        """What the receive yields, all tensors of `incoming` being here."""
        ...


class RecvLane:
    """Takes in the messages of one peer and hands them to claims in order.

    Lanes are independent: one that nobody reads holds up no other.  At most
    `unclaimed` complete messages are taken in before they are asked for;
    payload that is not inline is received only when it is.

    A claim that declares a size posts its device receive at once, once a message
    has shown that the peer declares the same.  The payloads of such messages have
    that size and a device lane of their own, so whichever of them is next will
    fill it.  One receive is posted ahead of its header at a time.
    """

    def __init__(self, context: LaneContext, endpoint: Endpoint, key: LaneKey, tag: int) -> None:
        self.key = key
        self.name = f"recv {key}"
        self._context = context
        self._endpoint = endpoint
        self._tag = tag
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
        self._head = bytearray(capacity(context.inline_bytes))
        self._head_view = memoryview(self._head)
        self._head_tensor = torch.frombuffer(self._head, dtype=torch.uint8)

    @property
    def open(self) -> bool:
        """Whether a goodbye is still to come on this lane."""
        return not self._ended

    @property
    def taken(self) -> int:
        """How many messages were handed to claims or are here for one."""
        with self._lock:
            return self._taken + len(self._arrived)

    def start(self) -> None:
        """Post the first header receive.  Called once."""
        self._context.progress.start(self)

    def claim(self, claim: Claim) -> None:
        """Ask for the next message; the operation settles when it is here or cannot come."""
        incoming: Incoming | None = None
        error: CommError | None = None
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
            work = self._receive(self._head_tensor)
            while True:
                yield NativeWork(self._endpoint, work)
                del work
                incoming = yield from self._read_head()
                if incoming is None:
                    self._end()
                    return
                missing = incoming.placed(Placement.MESSAGE)
                if not missing:
                    self._hand_over(incoming)
                    del incoming
                    yield from self._throttle()
                    work = self._receive(self._head_tensor)
                    continue
                claim = yield from self._next_claim()
                buffers = self._buffers(incoming, claim, missing)
                if self._context.serial:
                    for buffer in buffers:
                        yield NativeWork(self._endpoint, self._receive(buffer))
                    self._hand_over(incoming, claim)
                    work = self._receive(self._head_tensor)
                else:
                    works = deque(self._receive(buffer) for buffer in buffers)
                    work = self._receive(self._head_tensor)
                    while works:
                        yield NativeWork(self._endpoint, works.popleft())
                    self._hand_over(incoming, claim)
                del incoming, claim, buffers
        except CommError as error:
            self._break(error)
        except Exception as error:
            self._context.peer_failed(self.key.peer, error)

    def _receive(self, buffer: Tensor) -> Any:
        return self._endpoint.irecv(buffer, self.key.peer, self._tag)

    def _read_head(self) -> Generator[NativeWork | Event, None, Incoming | None]:
        """Decode what arrived; ``None`` for a goodbye."""
        limits, where = self._context.limits, f"receive {self.key}"
        prefix = decode_prefix(self._head_view, limits, where)
        if prefix.sequence != self._expected:
            raise protocol_error(
                where, f"message {prefix.sequence} arrived, {self._expected} was expected"
            )
        self._expected += 1
        if prefix.long:
            rest = bytearray(prefix.body)
            tensor = torch.frombuffer(rest, dtype=torch.uint8)
            yield NativeWork(self._endpoint, self._receive(tensor))
            data = memoryview(rest)
        else:
            data = self._head_view[PREFIX_BYTES : PREFIX_BYTES + prefix.body]
        body = decode_body(prefix, data, limits, where)
        incoming = Incoming(prefix.kind, prefix.sequence, body, None)
        if prefix.kind is Kind.GOODBYE:
            with self._lock:
                self._goodbye = incoming
                self._defer_goodbye()
            return None
        parsed = None
        if prefix.kind in (Kind.OBJECT, Kind.TENSOR_DICT):
            parsed = parse(body.value, len(body.tensors), limits, where)
        elif prefix.kind is Kind.TENSOR and len(body.tensors) != 1:
            raise protocol_error(where, "a tensor message must carry one tensor")
        incoming.parsed = parsed
        if self._context.device is None and incoming.on_device:
            raise protocol_error(where, "the message has device payload, this rank has no device")
        if Placement.RESERVED in body.placements:
            if self._reserved not in (0, body.at_most):
                raise protocol_error(
                    where, f"{body.at_most} bytes are declared, and were {self._reserved} before"
                )
            self._reserved = body.at_most
        self._unpack_inline(incoming, PREFIX_BYTES + prefix.body)
        return incoming

    def _unpack_inline(self, incoming: Incoming, offset: int) -> None:
        """Copy what travelled in the header out of it, so that its buffer can be posted again."""
        body = incoming.body
        with torch.inference_mode(False):
            for meta, place in zip(body.tensors, body.placements, strict=True):
                if place >= Placement.MESSAGE:
                    incoming.tensors.append(None)
                    continue
                tensor = from_meta(meta, "cpu")
                if place == Placement.INLINE:
                    source = torch.frombuffer(
                        self._head, dtype=torch.uint8, offset=offset, count=meta.nbytes
                    )
                    as_bytes(tensor).copy_(source)
                    offset += meta.nbytes
                incoming.tensors.append(tensor)

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

    def _buffers(
        self, incoming: Incoming, claim: Claim | None, missing: Sequence[int]
    ) -> list[Tensor]:
        """Where to receive the payload: the claim's memory, a new tensor, or one to throw away."""
        wanted = claim is not None and claim.refusal(incoming) is None
        buffers = []
        for index in missing:
            buffer = claim.buffer(incoming, index) if claim is not None and wanted else None
            if buffer is None:
                fresh = self._allocate(incoming.body.tensors[index])
                if wanted:
                    incoming.tensors[index] = fresh
                buffer = as_bytes(fresh)
            buffers.append(buffer)
        return buffers

    def _allocate(self, meta: TensorMeta) -> Tensor:
        try:
            with torch.inference_mode(False):
                return from_meta(meta, "cpu")
        except (RuntimeError, MemoryError) as error:
            raise CommError(
                ErrorKind.PROTOCOL,
                f"receive {self.key}",
                f"no memory for a tensor of {meta.nbytes} bytes ({error})",
                "Lower max_message_bytes on both ranks, or send less at once",
            ) from error

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
        if incoming.placed(Placement.RESERVED):
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
            with torch.inference_mode():
                return claim.value(incoming)
        except CommError as failure:
            self._context.ledger.fail(operation, failure)
        except Exception as failure:
            self._context.ledger.fail(
                operation,
                protocol_error(operation.describe(), f"the value cannot be built ({failure})"),
            )
        return None

    def _end(self) -> None:
        self._ended = True
        self.fail(
            CommError(
                ErrorKind.CLOSED,
                f"receive {self.key}",
                f"rank {self.key.peer} has closed its communicator and sends no more",
                "Receive everything before the peer closes",
            )
        )

    def _break(self, error: CommError) -> None:
        self._ended = True
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

    def _discard_arrived(self) -> None:
        """Throw away what arrived, from the first message with payload on a device on."""
        first = next((n for n, i in enumerate(self._arrived) if i.on_device), None)
        if first is not None:
            while len(self._arrived) > first:
                self._defer(None, self._arrived[first])
                del self._arrived[first]
        self._defer_goodbye()

    def abandon(self, error: BaseException) -> None:
        self._break(_driver_died(self.name, error))


def reserved_key(key: LaneKey) -> LaneKey:
    """The device lane of the reserved payloads of lane `key`."""
    return key._replace(tag=key.tag + RESERVED)


def _driver_died(name: str, error: BaseException) -> CommError:
    failure = CommError(
        ErrorKind.PROTOCOL,
        f"lane {name}",
        f"the task that drives it died ({type(error).__name__}: {error})",
        "This is a defect of commlayer or of the plugin; see the log",
    )
    failure.__cause__ = error
    return failure
