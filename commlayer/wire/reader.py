"""Header messages on their way in: from bytes to a message that was checked.

Everything that a peer says is judged here, before a receive is posted for it, because a
receive of another size than the message kills the process on some transports.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About
from commlayer.wire.frame import (
    APART,
    CHECKSUM,
    DEFINE,
    EARNED_SLOTS,
    FIELDS,
    FLAGS,
    KINDS,
    LONG,
    MAGIC,
    MAX_SCHEMAS,
    NOWHERE,
    ON_DEVICE,
    PREFIX_BYTES,
    UNSLOTTED,
    VALUE,
    WIRE_VERSION,
    Body,
    Kind,
    Placement,
    Prefix,
    fits_a_slot,
    protocol_error,
)
from commlayer.wire.tensors import DTYPES, TensorMeta
from commlayer.wire.values import Parsed, parse

_VALUES = (Kind.OBJECT, Kind.TENSOR_DICT)

NewTensor = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype."""


class Schema:
    """What a header says of its tensors and value, checked.

    `nbytes` is the size of all tensors, `inline` of those in the header message.
    `parts` are shape, dtype, size in bytes and placement of each tensor, `payload`
    the indices of those that are messages of their own, which may be received ahead if it
    `may_have_slot`.  `reusable` is the parsed
    value where it can be built any number of times.
    """

    __slots__ = (
        "body",
        "inline",
        "kind",
        "may_have_slot",
        "nbytes",
        "needs_device",
        "on_device",
        "parts",
        "payload",
        "reserved",
        "reusable",
    )

    def __init__(self, kind: Kind, body: Body, reusable: Parsed | None) -> None:
        placements = body.placements
        self.kind = kind
        self.body = body
        self.reusable = reusable
        self.parts = [
            (meta.shape, DTYPES[meta.dtype], meta.nbytes, place)
            for meta, place in zip(body.tensors, placements, strict=True)
        ]
        self.nbytes = sum(meta.nbytes for meta in body.tensors)
        self.inline = body.inline_bytes
        self.payload = [i for i, place in enumerate(placements) if place == Placement.MESSAGE]
        self.on_device = any(place in ON_DEVICE for place in placements)
        self.needs_device = self.on_device or Placement.EMPTY_ON_DEVICE in placements
        self.reserved = Placement.RESERVED in placements
        self.may_have_slot = fits_a_slot([self.parts[index][2] for index in self.payload])

    def allocate(self, on_device: NewTensor | None) -> list[Tensor | None] | None:
        """New tensors for what travels in the header, and for what is empty.

        ``None`` where there is no memory for them.
        """
        try:
            with torch.inference_mode(False):
                return [
                    None
                    if place in APART
                    else on_device(shape, dtype)
                    if place == Placement.EMPTY_ON_DEVICE and on_device is not None
                    else torch.empty(shape, dtype=dtype, device="cpu")
                    for shape, dtype, _, place in self.parts
                ]
        except (RuntimeError, MemoryError):
            return None


class ReceivedSchemas:
    """Numbers that the peer has given."""

    def __init__(self) -> None:
        self._known: dict[int, Schema] = {}

    def define(self, number: int, schema: Schema) -> None:
        self._known[number] = schema

    def named(self, prefix: Prefix, where: About) -> Schema:
        """The schema that `prefix` names; raises `CommError` (PROTOCOL) unless it fits."""
        schema = self._known.get(prefix.schema)
        if schema is None:
            raise protocol_error(where, f"the header names schema {prefix.schema}, not defined")
        if schema.kind is not prefix.kind or schema.inline != prefix.inline:
            raise protocol_error(where, f"the header contradicts schema {prefix.schema}")
        if bool(prefix.body) and not prefix.flags & VALUE:
            raise protocol_error(where, "the header has a body and names a schema")
        return schema


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
    `on_device` makes tensors on the rank's device, if it has one.  All methods raise `CommError`
    (PROTOCOL) for bytes that cannot be trusted.
    """

    def __init__(
        self, limits: CommConfig, where: About, slots: int, on_device: NewTensor | None
    ) -> None:
        self._limits = limits
        self._where = where
        self._slots = slots
        self._on_device = on_device
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
        if prefix.schema and not prefix.flags & DEFINE:
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
        if schema.needs_device and self._on_device is None:
            raise protocol_error(where, "the message has device payload, this rank has no device")
        if bool(prefix.slot) != bool(schema.payload) or (
            prefix.slot > UNSLOTTED
            and not (schema.may_have_slot and prefix.slot <= UNSLOTTED + self._slots)
        ):
            raise protocol_error(where, f"the message may not use payload slot {prefix.slot}")

    def unpack(self, incoming: Incoming, address: int) -> None:
        """Copy what travelled inline, from `address` on, so that its buffer can be posted again."""
        schema = incoming.schema
        tensors: list[Tensor | None] | None
        if self._fresh is not None and self._fresh[0] is schema:
            tensors, self._fresh = self._fresh[1], None
        else:
            tensors = schema.allocate(self._on_device)
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
        tensors = schema.allocate(self._on_device)
        self._fresh = None if tensors is None else (schema, tensors)


@lru_cache(maxsize=8)
def _decoder(max_items: int) -> msgspec.msgpack.Decoder[Body]:
    """A decoder that refuses more than `max_items` tensors before it makes the first."""
    tensors = Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=max_items)]
    limited = msgspec.defstruct(
        "Body", [("tensors", tensors)], bases=(Body,), array_like=True, frozen=True
    )
    return msgspec.msgpack.Decoder(limited)


def decode_prefix(data: memoryview, limits: CommConfig, where: About) -> Prefix:
    """Read and check the prefix in `data`, a header buffer of any content.

    Raises `CommError` (PROTOCOL) for another magic or version, an unknown kind
    or flag, a schema or slot out of range, and for lengths that exceed the
    limits or the buffer.
    """
    magic, version, kind, flags, slot, sequence, step, schema, body, inline = FIELDS.unpack_from(
        data
    )
    if magic != MAGIC:
        raise protocol_error(where, "the message does not begin with a commlayer header")
    if version != WIRE_VERSION:
        raise protocol_error(
            where, f"the message has wire version {version}, this rank speaks {WIRE_VERSION}"
        )
    known = KINDS.get(kind)
    if known is None:
        raise protocol_error(where, f"the header has unknown kind {kind}")
    if flags & ~FLAGS:
        raise protocol_error(where, f"the header has unknown flags {flags:#x}")
    if schema > MAX_SCHEMAS or (flags & DEFINE and not schema):
        raise protocol_error(where, f"the header has schema {schema} of {MAX_SCHEMAS}")
    if slot > UNSLOTTED + EARNED_SLOTS or (slot > UNSLOTTED and not schema):
        raise protocol_error(where, f"the header has payload slot {slot}")
    if body > limits.max_header_bytes:
        raise protocol_error(
            where, f"a header of {body} bytes exceeds max_header_bytes = {limits.max_header_bytes}"
        )
    if PREFIX_BYTES + inline + (0 if flags & LONG else body) > len(data):
        raise protocol_error(
            where, f"lengths of {body} and {inline} bytes do not fit the header message"
        )
    (checksum,) = CHECKSUM.unpack_from(data, FIELDS.size)
    seed = zlib.crc32(data[: FIELDS.size])
    return Prefix(known, flags, slot, sequence, step, schema, body, inline, checksum, seed)


def check_body(prefix: Prefix, data: memoryview | bytes, where: About) -> None:
    """Raise `CommError` (PROTOCOL) unless `data` is the body that belongs to `prefix`."""
    if zlib.crc32(data, prefix.seed) != prefix.checksum:
        raise protocol_error(where, "the header is damaged or truncated (checksum differs)")


def decode_body(prefix: Prefix, data: memoryview, limits: CommConfig, where: About) -> Body:
    """Decode and check the body in `data` (exactly the body's bytes).

    Raises `CommError` (PROTOCOL) unless every tensor is within the limits, the
    placements agree with the tensors, and the inline payload has exactly the
    size that they add up to.
    """
    check_body(prefix, data, where)
    try:
        body = _decoder(limits.max_items).decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise protocol_error(where, f"the header cannot be decoded ({error})") from error
    if len(body.placements) != len(body.tensors):
        raise protocol_error(where, "the header does not place every tensor")
    inline = total = 0
    for meta, place in zip(body.tensors, body.placements, strict=True):
        meta.check(limits, where)
        total += meta.nbytes
        if place == Placement.INLINE:
            inline += meta.nbytes
        if place == Placement.RESERVED:
            _check_reserved(body, limits, where)
        elif place > max(Placement) or (place in NOWHERE) != (meta.nbytes == 0):
            raise protocol_error(where, "the header places a tensor wrongly")
    if inline != prefix.inline:
        raise protocol_error(
            where, f"the inline tensors have {inline} bytes, the header says {prefix.inline}"
        )
    if total > limits.max_message_bytes:
        raise protocol_error(
            where, f"{total} bytes of tensors exceed max_message_bytes = {limits.max_message_bytes}"
        )
    return body


def _check_reserved(body: Body, limits: CommConfig, where: About) -> None:
    if len(body.tensors) != 1 or body.at_most <= 0:
        raise protocol_error(where, "the header reserves a size for something else than one tensor")
    if body.at_most > limits.max_message_bytes:
        raise protocol_error(
            where,
            f"the declared {body.at_most} bytes exceed "
            f"max_message_bytes = {limits.max_message_bytes}",
        )
