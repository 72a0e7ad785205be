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
`commlayer.wire.message`).

This module is the format alone: `message` writes headers and `reader` reads them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec

from commlayer.errors import About, CommError, ErrorKind
from commlayer.wire.tensors import TensorMeta

WIRE_VERSION = 3
MAGIC = b"CML"
FIELDS = struct.Struct("<3sBBBBxQqIII")
CHECKSUM = struct.Struct("<I")
PREFIX_BYTES = FIELDS.size + CHECKSUM.size
_BODY_ROOM = 2008

LONG = 1
DEFINE = 2
VALUE = 4
FLAGS = LONG | DEFINE | VALUE

MAX_SCHEMAS = 1024
"""A lane numbers its schemas from 1 to this."""
UNSLOTTED = 1
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


KINDS = {int(kind): kind for kind in Kind}


class Placement(IntEnum):
    """Where the bytes of a tensor travel."""

    EMPTY = 0
    INLINE = 1
    MESSAGE = 2
    DEVICE = 3
    """A message of its own, on the device transport."""
    RESERVED = 4
    """A message of its own of ``Body.at_most`` bytes, on a device lane of such messages."""
    EMPTY_ON_DEVICE = 5
    """No bytes; the tensor is made on the device."""


NOWHERE = frozenset({Placement.EMPTY, Placement.EMPTY_ON_DEVICE})
APART = frozenset({Placement.MESSAGE, Placement.DEVICE, Placement.RESERVED})
ON_DEVICE = frozenset({Placement.DEVICE, Placement.RESERVED})
"""Which tensors have no bytes, have messages of their own, and have those on the device."""


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


def capacity(inline_bytes: int) -> int:
    """Size of a header message's buffer for a configured number of inline bytes."""
    return PREFIX_BYTES + _BODY_ROOM + inline_bytes


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


def protocol_error(where: About, cause: str) -> CommError:
    """The error for a message that must not be trusted."""
    return CommError(
        ErrorKind.PROTOCOL,
        where,
        cause,
        "The sender runs another version or is not commlayer; check both ranks' versions and "
        "configuration",
    )


def fits_a_slot(sizes: Sequence[int]) -> bool:
    """Whether payload of these sizes in bytes may be received ahead, for both ends."""
    return 0 < len(sizes) <= SLOT_TENSORS and sum(sizes) <= SLOT_BYTES
