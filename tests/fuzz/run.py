"""Feeds damaged and made-up header messages to the decoder: ``python tests/fuzz/run.py [INPUTS]``.

Every input must be decoded, or refused by a `CommError` (PROTOCOL); nothing else,
and memory must not grow.  Inputs are valid messages with bytes changed, cut,
repeated or spliced, half of them with a checksum that fits again, and headers
whose fields are drawn at will.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from typing import Any

import torch

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.frame import LONG, PREFIX_BYTES, Kind, capacity
from commlayer.wire.message import UNPLANNED, Layouts, Outgoing
from commlayer.wire.reader import Schema, decode_body, decode_prefix
from commlayer.wire.values import pack, parse

INLINE = 4096
MOST_GROWTH = 64
"""MiB: far above what one refused message may cost, far below what one may announce."""
LIMITS = CommConfig(max_message_bytes=1 << 20, max_header_bytes=1 << 16, max_items=1000)
FIELDS = struct.Struct("<3sBBBBxQqIII")
INTERESTING = (0, 1, 2, 0x7F, 0x80, 0xC1, 0xC7, 0xD9, 0xDC, 0xDF, 0xFE, 0xFF)

VALUES: list[Any] = [
    {"hidden": torch.ones(8, 4), "residual": torch.ones(8, 4)},
    {"step": 3, "ids": [1, 2, 3], "name": "x" * 40, "mask": torch.ones(3, dtype=torch.bool)},
    [None, True, -1, 2**63, 1.5, 1j, b"bytes", "text", (1, {2, 3}), frozenset({4})],
    {"deep": [[[[[[{"a": torch.empty(0)}]]]]]], "size": torch.Size((1, 2))},
    torch.float16,
]


def valid() -> list[bytes]:
    layouts = Layouts(INLINE, None)
    messages = []
    for value in VALUES:
        packed, tensors = pack(value, LIMITS, "")
        layout = layouts.place(Kind.OBJECT, tensors, -1, False)
        head, _ = Outgoing(layout, tensors, packed).head(0, UNPLANNED)
        messages.append(bytes(head.tolist()))
    return messages


def damaged(message: bytes, others: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = rng.randrange(len(data)) if data else 0
        way = rng.randrange(6)
        if way == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif way == 1 and data:
            data[at] = rng.choice(INTERESTING)
        elif way == 2:
            del data[at : at + rng.randrange(1, 16)]
        elif way == 3:
            data[at:at] = data[at : at + rng.randrange(1, 16)]
        elif way == 4:
            other = rng.choice(others)
            begin = rng.randrange(len(other))
            data[at:at] = other[begin : begin + rng.randrange(1, 32)]
        elif data:
            data[at:] = data[at : at + rng.randrange(len(data))]
    return bytes(data)


def resealed(data: bytes) -> bytes:
    """`data` with the length and checksum that its body would have."""
    data = data.ljust(PREFIX_BYTES, b"\0")[: capacity(INLINE)]
    magic, version, kind, flags, slot, sequence, step, schema, _, inline = FIELDS.unpack_from(data)
    inline = min(inline, len(data) - PREFIX_BYTES)
    body = data[PREFIX_BYTES : len(data) - inline]
    fields = FIELDS.pack(
        magic, version, kind, flags, slot, sequence, step, schema, len(body), inline
    )
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(fields)))
    return fields + checksum + body + data[len(data) - inline :]


def drawn(rng: random.Random) -> bytes:
    """A header whose fields are at will behind the right magic and version."""
    body = rng.randbytes(rng.randrange(64))
    fields = FIELDS.pack(
        b"CML", 2, rng.randrange(8), rng.randrange(10), rng.randrange(10),
        rng.getrandbits(64), rng.getrandbits(63), rng.choice((0, 1, 1024, 2**32 - 1)),
        rng.choice((len(body), 0, 2**32 - 1)), rng.choice((0, 16, 2**32 - 1)),
    )  # fmt: skip
    return fields + struct.pack("<I", zlib.crc32(body, zlib.crc32(fields))) + body


def decode(data: bytes) -> str:
    """What becomes of `data`, as a receive lane treats it."""
    buffer = memoryview(bytearray(data[: capacity(INLINE)].ljust(capacity(INLINE), b"\0")))
    try:
        prefix = decode_prefix(buffer, LIMITS, "fuzz")
        end = PREFIX_BYTES + prefix.body
        content = buffer[PREFIX_BYTES:end]
        if prefix.flags & LONG:
            content = memoryview(data[PREFIX_BYTES:])
        body = decode_body(prefix, content, LIMITS, "fuzz")
        schema = Schema(prefix.kind, body, None)
        if prefix.kind in (Kind.OBJECT, Kind.TENSOR_DICT):
            parsed = parse(body.value, len(body.tensors), LIMITS, "fuzz")
            parsed.build(
                [torch.empty(shape, dtype=dtype) for shape, dtype, _, _ in schema.parts], "fuzz"
            )
    except CommError as error:
        if error.kind is not ErrorKind.PROTOCOL:
            raise
        return "refused"
    return "decoded"


def main(inputs: int, seed: int = 0) -> None:
    rng, messages = random.Random(seed), valid()
    outcomes: Counter[str] = Counter()
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for message in messages:
        assert decode(message) == "decoded"
    for number in range(inputs):
        data = drawn(rng) if number % 8 == 7 else damaged(rng.choice(messages), messages, rng)
        data = resealed(data) if number % 2 else data
        try:
            outcomes[decode(data)] += 1
        except Exception:
            print(f"input {number} of seed {seed}: {data.hex()}")
            raise
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(
        f"{inputs:,} inputs (seed {seed}) in {time.monotonic() - begin:.0f} s: "
        f"{outcomes['refused']:,} refused, {outcomes['decoded']:,} decoded, nothing else; "
        f"memory grew by {grown:.0f} MiB"
    )
    assert grown < MOST_GROWTH


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200_000)
