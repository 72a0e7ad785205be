"""The header message: one fixed prefix, a typed body, and what travels inline.

::

    prefix (32 bytes)  magic "CML", wire version, kind, flags, sequence number,
                       length of the body, length of the inline payload, checksum
    body               msgpack: tensors, placements, collective step, value
    inline payload     the bytes of the tensors placed inline, in order

A message whose prefix, body and inline payload do not fit into `capacity`
bytes sends the prefix alone with the flag LONG, then the body as a message of
its own.  Tensors that are not inline follow in order, one message each.
Everything is validated before a receive is posted, because a receive of
another size than the message kills the process on some transports.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from commlayer.errors import CommError, ErrorKind
from commlayer.wire.tensors import Limits, TensorMeta, as_bytes, meta_of

WIRE_VERSION = 1
_MAGIC = b"CML"
_PREFIX = struct.Struct("<3sBBBxxQIIIxxxx")
PREFIX_BYTES = _PREFIX.size
_BODY_ROOM = 2016
_LONG = 1


class Kind(IntEnum):
    """What a message carries."""

    TENSOR = 1
    OBJECT = 2
    TENSOR_DICT = 3
    CONTROL = 4
    GOODBYE = 5


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

    `placements` has one `Placement` per tensor.  `step` counts the collective
    calls on the channel (-1: not a collective).  `value` is the packed value.
    `at_most` is the size in bytes that was declared for the tensor (-1: none was).
    """

    tensors: tuple[TensorMeta, ...] = ()
    placements: bytes = b""
    step: int = -1
    value: bytes = b""
    at_most: int = -1


_encoder = msgspec.msgpack.Encoder()


@lru_cache(maxsize=8)
def _decoder(max_items: int) -> msgspec.msgpack.Decoder[Body]:
    """A decoder that refuses more than `max_items` tensors before it makes the first."""
    tensors = Annotated[tuple[TensorMeta, ...], msgspec.Meta(max_length=max_items)]
    limited = msgspec.defstruct(
        "Body", [("tensors", tensors)], bases=(Body,), array_like=True, frozen=True
    )
    return msgspec.msgpack.Decoder(limited)


def capacity(inline_bytes: int) -> int:
    """Size of a header message's buffer for a configured number of inline bytes."""
    return PREFIX_BYTES + _BODY_ROOM + inline_bytes


class Outgoing:
    """An encoded message, ready to be stamped and posted on any number of lanes."""

    __slots__ = (
        "_body",
        "_head",
        "device_payload",
        "header_bytes",
        "kind",
        "nbytes",
        "payload",
        "reserved",
    )

    def __init__(
        self,
        kind: Kind,
        tensors: Sequence[Tensor],
        value: bytes,
        inline_bytes: int,
        step: int = -1,
        on_device: Callable[[Tensor], bool] | None = None,
        at_most: int = -1,
        reserved: Sequence[Tensor] | None = None,
    ) -> None:
        """`tensors` are contiguous; small ones are copied into the header, others posted.

        Those that `on_device` names go to the device transport.  With `reserved`
        the only tensor travels as the `at_most` bytes in it.
        """
        sources = [as_bytes(tensor) for tensor in tensors]
        if reserved is None:
            placements = _place(sources, inline_bytes, on_device)
        else:
            placements = bytes([Placement.RESERVED])
        inline = [s for s, place in zip(sources, placements, strict=True) if place == 1]
        inline_size = sum(source.numel() for source in inline)
        metas = tuple(meta_of(tensor) for tensor in tensors)
        body = _encoder.encode(Body(metas, placements, step, value, at_most))
        if PREFIX_BYTES + len(body) + inline_size > capacity(inline_bytes):
            placements = placements.replace(b"\x01", b"\x02")
            inline, inline_size = [], 0
            body = _encoder.encode(Body(metas, placements, step, value, at_most))
        long = PREFIX_BYTES + len(body) > capacity(inline_bytes)
        self.kind = kind
        self.payload = [s for s, place in zip(sources, placements, strict=True) if place == 2]
        self.reserved = reserved is not None
        self.device_payload = [
            s for s, place in zip(sources, placements, strict=True) if place == 3
        ]
        self.device_payload += reserved or ()
        prefix = _PREFIX.pack(
            _MAGIC, WIRE_VERSION, kind, _LONG if long else 0, 0,
            len(body), inline_size, zlib.crc32(body),
        )  # fmt: skip
        self.header_bytes = len(body)
        self._body = body if long else b""
        self._head = bytearray(prefix if long else prefix + body)
        if inline_size:
            offset = len(self._head)
            self._head.extend(bytes(inline_size))
            for source in inline:
                into = torch.frombuffer(
                    self._head, dtype=torch.uint8, offset=offset, count=source.numel()
                )
                into.copy_(source)
                offset += source.numel()
                del into
        self.nbytes = len(self._head) + len(self._body)
        self.nbytes += sum(p.numel() for p in (*self.payload, *self.device_payload))

    def messages(self, sequence: int) -> list[Tensor]:
        """The native messages in order, with `sequence` written into a header of their own."""
        head = bytearray(self._head)
        struct.pack_into("<Q", head, 8, sequence)
        messages = [torch.frombuffer(head, dtype=torch.uint8)]
        if self._body:
            messages.append(torch.frombuffer(bytearray(self._body), dtype=torch.uint8))
        messages.extend(self.payload)
        return messages


def _place(
    sources: Sequence[Tensor], room: int, on_device: Callable[[Tensor], bool] | None
) -> bytes:
    placements = bytearray(len(sources))
    for index, source in enumerate(sources):
        size = source.numel()
        if size == 0:
            continue
        if on_device is not None and on_device(source):
            placements[index] = Placement.DEVICE
        elif size <= room:
            room -= size
            placements[index] = Placement.INLINE
        else:
            placements[index] = Placement.MESSAGE
    return bytes(placements)


class Prefix(msgspec.Struct, frozen=True):
    """The decoded and checked prefix of a header message."""

    kind: Kind
    long: bool
    sequence: int
    body: int
    inline: int
    checksum: int


def protocol_error(where: str, cause: str) -> CommError:
    """The error for a message that must not be trusted."""
    return CommError(
        ErrorKind.PROTOCOL,
        where,
        cause,
        "The sender runs another version or is not commlayer; check both ranks' versions and "
        "configuration",
    )


def decode_prefix(data: memoryview, limits: Limits, where: str) -> Prefix:
    """Read and check the prefix in `data`, a header buffer of any content.

    Raises `CommError` (PROTOCOL) for another magic or version, an unknown kind
    or flag, and for lengths that exceed the limits or the buffer.
    """
    magic, version, kind, flags, sequence, body, inline, checksum = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise protocol_error(where, "the message does not begin with a commlayer header")
    if version != WIRE_VERSION:
        raise protocol_error(
            where, f"the message has wire version {version}, this rank speaks {WIRE_VERSION}"
        )
    if flags & ~_LONG:
        raise protocol_error(where, f"the header has unknown flags {flags:#x}")
    try:
        known = Kind(kind)
    except ValueError:
        raise protocol_error(where, f"the header has unknown kind {kind}") from None
    long = bool(flags & _LONG)
    if body > limits.max_header_bytes:
        raise protocol_error(
            where, f"a header of {body} bytes exceeds max_header_bytes = {limits.max_header_bytes}"
        )
    if (long and inline) or (not long and PREFIX_BYTES + body + inline > len(data)):
        raise protocol_error(
            where, f"lengths of {body} and {inline} bytes do not fit the header message"
        )
    return Prefix(known, long, sequence, body, inline, checksum)


def decode_body(prefix: Prefix, data: memoryview, limits: Limits, where: str) -> Body:
    """Decode and check the body in `data` (exactly the body's bytes).

    Raises `CommError` (PROTOCOL) unless every tensor is within the limits, the
    placements agree with the tensors, and the inline payload has exactly the
    size that they add up to.
    """
    if zlib.crc32(data) != prefix.checksum:
        raise protocol_error(where, "the header is damaged or truncated (checksum differs)")
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


def _check_reserved(body: Body, limits: Limits, where: str) -> None:
    if len(body.tensors) != 1 or body.at_most <= 0:
        raise protocol_error(where, "the header reserves a size for something else than one tensor")
    if body.at_most > limits.max_message_bytes:
        raise protocol_error(
            where,
            f"the declared {body.at_most} bytes exceed "
            f"max_message_bytes = {limits.max_message_bytes}",
        )
