"""The header message: one fixed prefix, a typed body, and what travels inline.

::

    prefix (40 bytes)  magic "CML", wire version, kind, flags, slot, sequence number,
                       collective step, schema, length of the body, length of the inline
                       payload, checksum of all this and the body
    body               msgpack: tensors, placements, declared size, value
    inline payload     the bytes of the tensors placed inline, in order

A message may define a *schema*: its body, under a number.  Later messages that
name it have no body, or with the flag VALUE the packed value alone.  A body
that does not fit into `capacity` bytes follows as a message of its own (flag
LONG), before the tensors that are not inline, which follow in order, one
message each.  ``slot`` says on which native tag these are (see
`commlayer.wire.schemas`).

Everything is validated before a receive is posted, because a receive of
another size than the message kills the process on some transports.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec

from commlayer.config import CommConfig
from commlayer.errors import About, CommError, ErrorKind
from commlayer.wire.tensors import TensorMeta

WIRE_VERSION = 3
_MAGIC = b"CML"
_FIELDS = struct.Struct("<3sBBBBxQqIII")
_CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = _FIELDS.size + _CHECKSUM.size
_BODY_ROOM = 2008

LONG = 1
DEFINE = 2
VALUE = 4
_FLAGS = LONG | DEFINE | VALUE

MAX_SCHEMAS = 1024
"""A lane numbers its schemas from 1 to this."""
LOOSE = 1
"""The slot for payload whose receive is posted after its header."""
EARNED_SLOTS = 6
"""A schema that repeats may get one of the slots 2 to 7 of its lane."""
SLOT_BYTES = 4 << 20
"""Most payload of a message with a slot: larger buffers cost more ahead of time than they save."""
SLOT_TENSORS = 64
"""Most payload messages of a message with a slot."""


class Kind(IntEnum):
    """What a message carries."""

    TENSOR = 1
    OBJECT = 2
    TENSOR_DICT = 3
    CONTROL = 4
    GOODBYE = 5


_KINDS = {int(kind): kind for kind in Kind}


class Placement(IntEnum):
    """Where the bytes of a tensor travel."""

    EMPTY = 0
    INLINE = 1
    MESSAGE = 2
    DEVICE = 3
    """A message of its own, on the device transport."""
    RESERVED = 4
    """A message of its own of ``Body.at_most`` bytes, on a device lane of such messages."""


class Body(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The typed part of a header.

    `placements` has one `Placement` per tensor.  `at_most` is the size in bytes
    that was declared for the tensor (-1: none was).  `value` is the packed value.
    """

    tensors: tuple[TensorMeta, ...] = ()
    placements: bytes = b""
    at_most: int = -1
    value: bytes = b""

    @property
    def inline_bytes(self) -> int:
        """Bytes of the tensors placed inline."""
        return sum(
            meta.nbytes
            for meta, place in zip(self.tensors, self.placements, strict=True)
            if place == Placement.INLINE
        )


_encode = msgspec.msgpack.Encoder().encode


@lru_cache(maxsize=8)
def _decoder(max_items: int) -> msgspec.msgpack.Decoder[Body]:
    """A decoder that refuses more than `max_items` tensors before it makes the first."""
    tensors = Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=max_items)]
    limited = msgspec.defstruct(
        "Body", [("tensors", tensors)], bases=(Body,), array_like=True, frozen=True
    )
    return msgspec.msgpack.Decoder(limited)


def encode_shape(tensors: tuple[TensorMeta, ...], placements: bytes, at_most: int) -> bytes:
    """The bytes of a body up to its value; `encode_body` completes them."""
    parts = (_encode(tensors), _encode(placements), _encode(at_most))
    return b"\x94" + b"".join(parts)


def encode_body(shape: bytes, value: bytes) -> bytes:
    """The bytes of a body."""
    return shape + _encode(value)


def capacity(inline_bytes: int) -> int:
    """Size of a header message's buffer for a configured number of inline bytes."""
    return PREFIX_BYTES + _BODY_ROOM + inline_bytes


def encode_prefix(
    kind: int,
    flags: int,
    slot: int,
    sequence: int,
    step: int,
    schema: int,
    body: bytes,
    inline: int,
) -> bytes:
    """The bytes of a prefix, for a message with `body` and so many bytes inline."""
    fields = _FIELDS.pack(
        _MAGIC, WIRE_VERSION, kind, flags, slot, sequence, step, schema, len(body), inline
    )
    return fields + _CHECKSUM.pack(zlib.crc32(body, zlib.crc32(fields)))


class Prefix(NamedTuple):
    """The decoded and checked prefix of a header message.  `seed` begins its `checksum`."""

    kind: Kind
    flags: int
    slot: int
    sequence: int
    step: int
    schema: int
    body: int
    inline: int
    checksum: int
    seed: int

    @property
    def long(self) -> bool:
        """Whether the body is a message of its own."""
        return bool(self.flags & LONG)


def protocol_error(where: About, cause: str) -> CommError:
    """The error for a message that must not be trusted."""
    return CommError(
        ErrorKind.PROTOCOL,
        where,
        cause,
        "The sender runs another version or is not commlayer; check both ranks' versions and "
        "configuration",
    )


def decode_prefix(data: memoryview, limits: CommConfig, where: About) -> Prefix:
    """Read and check the prefix in `data`, a header buffer of any content.

    Raises `CommError` (PROTOCOL) for another magic or version, an unknown kind
    or flag, a schema or slot out of range, and for lengths that exceed the
    limits or the buffer.
    """
    magic, version, kind, flags, slot, sequence, step, schema, body, inline = _FIELDS.unpack_from(
        data
    )
    if magic != _MAGIC:
        raise protocol_error(where, "the message does not begin with a commlayer header")
    if version != WIRE_VERSION:
        raise protocol_error(
            where, f"the message has wire version {version}, this rank speaks {WIRE_VERSION}"
        )
    known = _KINDS.get(kind)
    if known is None:
        raise protocol_error(where, f"the header has unknown kind {kind}")
    if flags & ~_FLAGS:
        raise protocol_error(where, f"the header has unknown flags {flags:#x}")
    if schema > MAX_SCHEMAS or (flags & DEFINE and not schema):
        raise protocol_error(where, f"the header has schema {schema} of {MAX_SCHEMAS}")
    if slot > LOOSE + EARNED_SLOTS or (slot > LOOSE and not schema):
        raise protocol_error(where, f"the header has payload slot {slot}")
    if body > limits.max_header_bytes:
        raise protocol_error(
            where, f"a header of {body} bytes exceeds max_header_bytes = {limits.max_header_bytes}"
        )
    if PREFIX_BYTES + inline + (0 if flags & LONG else body) > len(data):
        raise protocol_error(
            where, f"lengths of {body} and {inline} bytes do not fit the header message"
        )
    (checksum,) = _CHECKSUM.unpack_from(data, _FIELDS.size)
    seed = zlib.crc32(data[: _FIELDS.size])
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
        elif place > Placement.DEVICE or (place == Placement.EMPTY) != (meta.nbytes == 0):
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
