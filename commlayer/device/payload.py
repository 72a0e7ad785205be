"""The device halves of the two ends of a lane.

A message with payload on a device is a header on the host lane and payload on a device
lane.  Both must keep one order.  A header arrives on a driver, but device operations are
posted in calls of the user only, so that they follow the program order of his streams:
what a driver finds is therefore deferred, and posted by `advance` in the next call.

A payload of a declared size (*reserved*) has a device lane of its own, on which every
message has that one size.  Whichever of them is next fits a receive that was posted
before its header: no rendezvous through the host.  The last such receive has no message;
a goodbye completes it with padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from commlayer.device.side import DeviceSide
from commlayer.errors import About
from commlayer.progress.claim import Claim
from commlayer.progress.operation import DevicePart, LaneKey, Operation
from commlayer.wire.frame import Kind, Placement, protocol_error
from commlayer.wire.message import Layout, Outgoing, plain
from commlayer.wire.reader import Incoming, Schema
from commlayer.wire.tags import RESERVED
from commlayer.wire.tensors import DTYPES, as_bytes, meta_of


def _reserved_key(key: LaneKey) -> LaneKey:
    """The device lane of the reserved payloads of lane `key`."""
    return key._replace(tag=key.tag + RESERVED)


class SendPayload:
    """Posts the device payload of one sending lane.

    `turn` gives headers and payload one order whichever threads post.  It is taken before
    the lane's lock and the side's.  `failed` is told of a native error.
    """

    def __init__(self, side: DeviceSide, key: LaneKey, failed: Callable[[Exception], None]) -> None:
        self.turn = side.runtime.lock()
        self._side = side
        self._key = key
        self._failed = failed
        self._operations: list[Operation] = []
        self._reserved = 0

    @property
    def pending(self) -> list[Operation]:
        """Operations whose part on the device has not ended."""
        return [o for o in list(self._operations) if o.device is not None and not o.device.done]

    def expect(self, operation: Operation, outgoing: Outgoing) -> None:
        """Note that a part of `operation` is on the device.  Called under the lane's lock."""
        part = operation.device
        assert part is not None
        operation.parts = 2
        part.host_payload = bool(outgoing.payload)
        part.buffers = outgoing.device_payload
        self._operations = [*self.pending, operation]

    def open(self, outgoing: Outgoing) -> None:
        """Raise if there is no device lane for `outgoing`, before anything of it is posted."""
        if outgoing.device_payload:
            self._side.open(_reserved_key(self._key) if outgoing.reserved else self._key)

    def post(self, operation: Operation, outgoing: Outgoing) -> None:
        """Post the device payload of `outgoing`.  Called in the user's call, under `turn`."""
        with self._side.lock:
            key = self._key
            if outgoing.reserved:
                key = _reserved_key(key)
                self._reserved = outgoing.device_payload[0].numel()
            self._side.lane(key).send(operation, outgoing.device_payload)

    def goodbye(self) -> Outgoing:
        """The last message.  It announces padding where the peer may have posted a receive."""
        if not self._reserved:
            return plain(Kind.GOODBYE)
        self._side.postpone(self)
        nothing = torch.empty(0, dtype=torch.uint8)
        place = bytes([Placement.RESERVED])
        layout = Layout(Kind.GOODBYE, (meta_of(nothing),), place, 0, self._reserved)
        return Outgoing(layout, (nothing,), b"")

    def advance(self) -> None:
        """Post the padding that `goodbye` announced.  Called under the side's lock."""
        with torch.inference_mode(False):
            padding = self._side.device.empty((self._reserved,), torch.uint8)
        operation = Operation("last payload", self._key, 0, self._side.runtime.now())
        operation.device = DevicePart(buffers=(padding,))
        self._side.lane(_reserved_key(self._key)).send(operation, (padding,))

    def post_failed(self, error: Exception) -> None:
        """`advance` has raised `error`."""
        self._failed(error)


class _NoMemory(Exception):
    """The device has no room for a message."""


class ReceivePayload:
    """Receives the device payload of one receiving lane.

    `match(claim, incoming)` says whether a claim takes a message, and fails it if it does
    not; `build(claim, incoming)` makes what it yields; both are the lane's.  `failed` is
    told of a native error and returns nothing.
    """

    def __init__(
        self,
        side: DeviceSide,
        key: LaneKey,
        match: Callable[[Claim, Incoming], bool],
        build: Callable[[Claim, Incoming], Any],
        failed: Callable[[Exception], None],
        lost: Callable[[Claim, Exception], None],
    ) -> None:
        self._side = side
        self._key = key
        self._match = match
        self._build = build
        self._failed = failed
        self._lost = lost
        self._deferred: deque[tuple[Claim | None, Incoming]] = deque()
        self._goodbye: Incoming | None = None
        self._reserved = 0
        self._ahead: tuple[Tensor, DevicePart] | None = None

    def declare(self, schema: Schema, where: About) -> None:
        """Note the declared size of a message; raises `CommError` (PROTOCOL) for another one."""
        size = schema.body.at_most
        if self._reserved not in (0, size):
            raise protocol_error(
                where, f"{size} bytes are declared, and were {self._reserved} before"
            )
        self._reserved = size

    def post_ahead(self, size: int) -> None:
        """Post the receive of the next reserved message before its header is here.

        Only once a message has shown that the peer declares the same `size`, and one at a
        time.  Called in the user's call.
        """
        side = self._side
        if side.capture_refused():
            return
        try:
            with side.lock:
                if size == self._reserved and self._ahead is None:
                    self._ahead = self._receive_reserved("receive posted ahead", size)
        except _NoMemory:
            pass  # it is posted when its header is here, if there is room then
        except Exception as error:
            self._failed(error)

    def defer(self, claim: Claim | None, incoming: Incoming) -> bool:
        """Leave `incoming` to `advance` if it has payload on the device.

        Without a claim it is received and thrown away.  Called under the lane's lock, so
        that messages are deferred in their order.
        """
        if not incoming.schema.on_device:
            return False
        self._deferred.append((claim, incoming))
        self._side.postpone(self)
        return True

    def say_goodbye(self, goodbye: Incoming) -> None:
        """Note the last message; `defer_goodbye` leaves it to `advance`."""
        self._goodbye = goodbye

    def defer_goodbye(self, arrived: Iterable[Incoming]) -> None:
        """Leave the goodbye to `advance`, behind every message before it.

        Called under the lane's lock, whenever one of those that `arrived` was claimed.
        """
        if self._goodbye is not None and not any(i.schema.on_device for i in arrived):
            self.defer(None, self._goodbye)
            self._goodbye = None

    def advance(self) -> None:
        """Post what was deferred, in the order of the lane.  Called under the side's lock."""
        while self._deferred:
            claim, incoming = self._deferred[0]
            if claim is not None and not self._match(claim, incoming):
                claim = None
            try:
                if incoming.schema.reserved:
                    self._receive_at_most(claim, incoming)
                else:
                    self._receive(claim, incoming)
            except _NoMemory:
                self._lose_deferred()
                return
            # Only now: what raises is still among what `post_failed` fails.
            self._deferred.popleft()

    def _lose_deferred(self) -> None:
        """Tell who asked that there is no memory.

        The messages stay, to be received and thrown away by a later call that finds
        room: until then they are in the way of what follows them.
        """
        for number, (claim, incoming) in enumerate(self._deferred):
            sizes = [meta.nbytes for meta in incoming.body.tensors]
            incoming.lost_bytes = max(1, incoming.body.at_most, sum(sizes))
            if claim is not None:
                self._match(claim, incoming)
            self._deferred[number] = (None, incoming)

    def post_failed(self, error: Exception) -> None:
        """`advance` has raised `error`: its peer is lost, and with it what was deferred."""
        deferred = list(self._deferred)
        self._deferred.clear()
        self._failed(error)
        for claim, _ in deferred:
            if claim is not None:
                self._lost(claim, error)

    def _receive(self, claim: Claim | None, incoming: Incoming) -> None:
        buffers = []
        for index in incoming.placed(Placement.DEVICE):
            meta = incoming.body.tensors[index]
            buffer = None if claim is None else claim.buffer(incoming, index)
            if buffer is None:
                fresh = self._empty(meta.shape, DTYPES[meta.dtype])
                incoming.tensors[index] = fresh
                buffer = as_bytes(fresh)
            buffers.append(buffer)
        lane = self._side.lane(self._key)
        if claim is None:
            lane.receive(self._internal("discarded receive"), buffers, lambda: None)
            return
        operation = claim.operation
        assert operation.device is not None
        operation.device.received = buffers
        lane.receive(
            operation,
            buffers,
            lambda: self._build(claim, incoming),
            kernels=claim.copies and any(tensor is not None for tensor in incoming.tensors),
        )

    def _receive_at_most(self, claim: Claim | None, incoming: Incoming) -> None:
        """As `_receive`, for a reserved message: its receive may be posted already."""
        ahead, self._ahead = self._ahead, None
        body = incoming.body
        if incoming.kind is Kind.GOODBYE:
            self._reserved = 0
        buffer, posted = ahead or self._receive_reserved("receive of a declared size", body.at_most)
        if claim is None:
            return
        meta = body.tensors[0]
        with torch.inference_mode(False):
            part = buffer[: meta.nbytes].view(DTYPES[meta.dtype])
            incoming.tensors[0] = part.view(meta.shape)
        operation = claim.operation
        assert operation.device is not None
        operation.device.received = [buffer]
        lane = self._side.lane(_reserved_key(self._key))
        lane.receive(
            operation,
            (),
            lambda: self._build(claim, incoming),
            kernels=claim.copies,
            follows=posted,
        )

    def _receive_reserved(self, kind: str, size: int) -> tuple[Tensor, DevicePart]:
        """Post the receive of a message of the declared size."""
        buffer = self._empty((size,), torch.uint8)
        operation = self._internal(kind)
        assert operation.device is not None
        self._side.lane(_reserved_key(self._key)).receive(operation, [buffer], lambda: None)
        return buffer, operation.device

    def _internal(self, kind: str) -> Operation:
        """An operation of the library's own."""
        operation = Operation(kind, self._key, 0, self._side.runtime.now())
        operation.device = DevicePart()
        return operation

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # A call inside inference mode must not make the user's tensor an inference tensor.
        try:
            with torch.inference_mode(False):
                return self._side.device.empty(shape, dtype)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise _NoMemory from error
