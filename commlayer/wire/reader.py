"""Header messages on their way in: from bytes to a message that was checked.

Everything that a peer says is judged here, before a receive is posted for it, because a
receive of another size than the message kills the process on some transports.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About
from commlayer.wire.frame import (
    LOOSE,
    PREFIX_BYTES,
    Body,
    Kind,
    Placement,
    Prefix,
    check_body,
    decode_body,
    decode_prefix,
    protocol_error,
)
from commlayer.wire.schemas import ReceivedSchemas, Schema, is_named
from commlayer.wire.values import Parsed, parse

_VALUES = (Kind.OBJECT, Kind.TENSOR_DICT)


class Incoming:
    """A message whose header was checked.

    `nbytes` is its size, header included.  `tensors` are those that are here: payload that a
    claim received into its own memory stays ``None``.
    """

    __slots__ = (
        "body",
        "kind",
        "lost_bytes",
        "nbytes",
        "parsed",
        "schema",
        "sequence",
        "slot",
        "step",
        "tensors",
    )

    def __init__(self, prefix: Prefix, schema: Schema, parsed: Parsed | None) -> None:
        self.schema = schema
        self.kind = schema.kind
        self.body = schema.body
        self.sequence = prefix.sequence
        self.slot = prefix.slot
        self.step = prefix.step
        self.nbytes = PREFIX_BYTES + prefix.body + schema.nbytes
        self.parsed = parsed
        self.tensors: list[Tensor | None] = []
        self.lost_bytes = 0
        """Bytes of the message for which this rank had no memory."""

    def placed(self, where: Placement) -> list[int]:
        """Indices of the tensors that travel as `where` says."""
        return [index for index, place in enumerate(self.body.placements) if place == where]


class HeaderReader:
    """Reads the header messages of one lane, in order, on one task.

    `where` is the lane in errors, `slots` how many slots this rank receives ahead on, and
    `has_device` whether it can receive payload on a device.  All methods raise `CommError`
    (PROTOCOL) for bytes that cannot be trusted.
    """

    def __init__(self, limits: CommConfig, where: About, slots: int, has_device: bool) -> None:
        self._limits = limits
        self._where = where
        self._slots = slots
        self._has_device = has_device
        self._schemas = ReceivedSchemas()
        self._expected = 0
        self._fresh: tuple[Schema, list[Tensor | None]] | None = None

    def prefix(self, view: memoryview) -> Prefix:
        """The prefix of the next message; a body may follow it or come as a message."""
        prefix = decode_prefix(view, self._limits, self._where)
        if prefix.sequence != self._expected:
            raise protocol_error(
                self._where,
                f"message {prefix.sequence} arrived, {self._expected} was expected",
            )
        self._expected += 1
        return prefix

    def message(self, prefix: Prefix, data: memoryview) -> Incoming:
        """The message of `prefix`, whose body is `data`."""
        incoming = self._decode(prefix, data)
        if prefix.kind is not Kind.GOODBYE:
            self._check(prefix, incoming.schema)
        return incoming

    def _decode(self, prefix: Prefix, data: memoryview) -> Incoming:
        if is_named(prefix):
            check_body(prefix, data, self._where)
            schema = self._schemas.named(prefix, self._where)
            if schema.kind not in _VALUES:
                return Incoming(prefix, schema, None)
            if prefix.body:
                return Incoming(prefix, schema, self._parse(schema.body, data))
            known = schema.reusable or self._parse(schema.body, schema.body.value)
            return Incoming(prefix, schema, known)
        body = decode_body(prefix, data, self._limits, self._where)
        parsed = self._parse(body, body.value) if prefix.kind in _VALUES else None
        reusable = parsed if parsed is not None and parsed.reusable else None
        schema = Schema(prefix.kind, body, reusable)
        if prefix.schema:
            self._schemas.define(prefix.schema, schema)
        return Incoming(prefix, schema, parsed)

    def _parse(self, body: Body, value: bytes | memoryview) -> Parsed:
        return parse(value, len(body.tensors), self._limits, self._where)

    def _check(self, prefix: Prefix, schema: Schema) -> None:
        where = self._where
        if schema.kind is Kind.TENSOR and len(schema.body.tensors) != 1:
            raise protocol_error(where, "a tensor message must carry one tensor")
        if schema.on_device and not self._has_device:
            raise protocol_error(where, "the message has device payload, this rank has no device")
        if bool(prefix.slot) != bool(schema.payload) or (
            prefix.slot > LOOSE
            and not (schema.may_have_slot and prefix.slot <= LOOSE + self._slots)
        ):
            raise protocol_error(where, f"the message may not use payload slot {prefix.slot}")

    def unpack(self, incoming: Incoming, address: int) -> None:
        """Copy what travelled inline, from `address` on, so that its buffer can be posted again."""
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

    def prepare(self, schema: Schema) -> None:
        """Allocate what the next message of `schema` needs, while nobody waits for it."""
        tensors = schema.allocate() if schema.inline else None
        self._fresh = None if tensors is None else (schema, tensors)
