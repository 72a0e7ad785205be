"""The header message: what is written is read again, and nothing else is accepted."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
import torch
from frames import messages, outgoing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.frame import (
    LONG,
    PREFIX_BYTES,
    WIRE_VERSION,
    Body,
    Kind,
    Placement,
    Prefix,
    capacity,
)
from commlayer.wire.message import UNPLANNED, SendPlan, encode_prefix
from commlayer.wire.reader import decode_body, decode_prefix
from commlayer.wire.tensors import as_bytes, from_meta

WHERE = "receive from rank 1"
INLINE = 256


def received(native: list[Tensor], inline_bytes: int = INLINE) -> tuple[Prefix, Body, list[bytes]]:
    """Read `native` messages as a receive lane does; also returns the bytes of every tensor."""
    queue = [bytes(message.tolist()) for message in native]
    assert len(queue[0]) <= capacity(inline_bytes)
    head = memoryview(bytearray(queue.pop(0).ljust(capacity(inline_bytes), b"\xaa")))
    prefix = decode_prefix(head, CommConfig(), WHERE)
    end = PREFIX_BYTES if prefix.flags & LONG else PREFIX_BYTES + prefix.body
    data = memoryview(queue.pop(0)) if prefix.flags & LONG else head[PREFIX_BYTES:end]
    body = decode_body(prefix, data, CommConfig(), WHERE)
    inline = head[end : end + prefix.inline]
    contents = []
    for meta, place in zip(body.tensors, body.placements, strict=True):
        if place == Placement.MESSAGE:
            contents.append(queue.pop(0))
        else:
            contents.append(bytes(inline[: meta.nbytes]))
            inline = inline[meta.nbytes :]
    assert not queue
    return prefix, body, contents


tensors = st.builds(
    lambda shape, dtype: (
        torch.arange(max(1, torch.Size(shape).numel()))
        .to(dtype)[: torch.Size(shape).numel()]
        .reshape(shape)
    ),
    st.lists(st.integers(0, 9), max_size=3),
    st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.complex64, torch.bool]),
)


@given(
    kind=st.sampled_from(Kind),
    tensors=st.lists(tensors, max_size=5),
    value=st.one_of(st.binary(max_size=60), st.integers(0, 5000).map(bytes)),
    inline_bytes=st.sampled_from([0, 7, INLINE]),
    step=st.integers(-1, 2**40),
    sequence=st.integers(0, 2**64 - 1),
)
def test_round_trip(
    kind: Kind,
    tensors: list[Tensor],
    value: bytes,
    inline_bytes: int,
    step: int,
    sequence: int,
) -> None:
    native = messages(kind, tensors, value, inline_bytes, sequence, step)
    prefix, body, contents = received(native, inline_bytes)
    assert (prefix.kind, prefix.sequence, prefix.step) == (kind, sequence, step)
    assert body.value == value
    assert [meta.shape for meta in body.tensors] == [tuple(t.shape) for t in tensors]
    assert contents == [bytes(as_bytes(t).tolist()) for t in tensors]


def test_small_tensors_travel_inside_the_header_and_large_ones_in_their_own_memory() -> None:
    small, large = torch.ones(4), torch.ones(INLINE)
    native = messages(Kind.TENSOR_DICT, [small, large, torch.empty(0)], b"", INLINE)
    assert len(native) == 2
    assert native[1].data_ptr() == large.data_ptr()
    _, body, _ = received(native)
    assert list(body.placements) == [Placement.INLINE, Placement.MESSAGE, Placement.EMPTY]


def test_a_long_body_is_a_message_of_its_own_and_moves_no_inline_tensor() -> None:
    native = messages(Kind.OBJECT, [torch.ones(4)], bytes(5000), INLINE)
    assert [message.numel() for message in native[:1]] == [PREFIX_BYTES + 16]
    assert len(native) == 2
    _, body, contents = received(native)
    assert list(body.placements) == [Placement.INLINE]
    assert contents == [bytes(as_bytes(torch.ones(4)).tolist())]


def test_one_message_is_stamped_for_several_lanes() -> None:
    out = outgoing(Kind.TENSOR, [torch.ones(4)], b"", INLINE)
    heads = [out.head(sequence, UNPLANNED)[0] for sequence in (1, 2)]
    assert [received([head])[0].sequence for head in heads] == [1, 2]


def test_a_message_that_names_its_schema_has_no_body_or_the_value_alone() -> None:
    out = outgoing(Kind.OBJECT, [torch.ones(4)], b"value", INLINE)
    for value, length in ((False, 0), (True, 5)):
        head, _ = out.head(0, SendPlan(3, True, value, 0))
        view = memoryview(bytearray(bytes(head.tolist()).ljust(capacity(INLINE))))
        prefix = decode_prefix(view, CommConfig(), WHERE)
        assert (prefix.schema, prefix.body, prefix.inline) == (3, length, 16)


# What must not be accepted

PREFIX = struct.Struct("<3sBBBBxQqIII")


def head(body: bytes = b"", /, **changed: Any) -> memoryview:
    fields = {
        "magic": b"CML",
        "version": WIRE_VERSION,
        "kind": int(Kind.TENSOR),
        "flags": 0,
        "slot": 0,
        "sequence": 0,
        "step": -1,
        "schema": 0,
        "body": len(body),
        "inline": 0,
    } | changed
    prefix = PREFIX.pack(*fields.values())
    checksum = struct.pack("<I", zlib.crc32(body, zlib.crc32(prefix)))
    return memoryview((prefix + checksum).ljust(capacity(INLINE), b"\x00"))


def test_the_prefix_is_as_documented() -> None:
    written = encode_prefix(Kind.TENSOR, 0, 0, 0, -1, 0, b"body", 0)
    assert written == bytes(head(b"body")[:PREFIX_BYTES])


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"magic": b"GET"}, "does not begin with a commlayer header"),
        ({"version": WIRE_VERSION + 1}, f"wire version {WIRE_VERSION + 1}"),
        ({"version": 0}, "wire version 0"),
        ({"kind": 0}, "unknown kind 0"),
        ({"kind": 99}, "unknown kind 99"),
        ({"flags": 8}, "unknown flags 0x8"),
        ({"flags": 2}, "schema 0 of"),
        ({"schema": 2**32 - 1}, "schema 4294967295 of"),
        ({"slot": 8, "schema": 1}, "payload slot 8"),
        ({"slot": 2}, "payload slot 2"),
        ({"flags": 0xFF}, "unknown flags"),
        ({"body": 2**32 - 1}, "exceeds max_header_bytes"),
        ({"body": 2**32 - 1, "flags": 1}, "exceeds max_header_bytes"),
        ({"inline": 2**32 - 1}, "do not fit"),
        ({"body": capacity(INLINE) - PREFIX_BYTES, "inline": 1}, "do not fit"),
        ({"flags": 1, "inline": capacity(INLINE) - PREFIX_BYTES + 1}, "do not fit"),
    ],
)
def test_a_malformed_prefix_is_refused(changed: dict[str, Any], cause: str) -> None:
    with pytest.raises(CommError, match=cause) as caught:
        decode_prefix(head(**changed), CommConfig(), WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert caught.value.operation == WHERE


def body(*tensors: Any, placements: bytes | None = None, **changed: Any) -> bytes:
    if placements is None:
        placements = bytes([Placement.MESSAGE] * len(tensors))
    fields = {"tensors": tensors, "placements": placements, "at_most": -1, "value": b""}
    return msgspec.msgpack.encode(tuple((fields | changed).values()))


def meta(dtype: Any = "float32", shape: Any = (3,), device: Any = "cpu") -> Any:
    return (dtype, shape, device)


BAD_BODIES = {
    "nothing": b"",
    "garbage": b"\xc1garbage",
    "not an array": msgspec.msgpack.encode({"tensors": []}),
    "too many fields": msgspec.msgpack.encode(((), b"", -1, b"", 1)),
    "trailing bytes": body() + b"\x00",
    "wrong type of size": body(at_most="0"),
    "fractional size": body(at_most=1.5),
    "placements missing": body(meta(), placements=b""),
    "placements in excess": body(placements=b"\x02"),
    "unknown placement": body(meta(), placements=b"\x05"),
    "reserved without a size": body(meta(), placements=b"\x04"),
    "reserved for two": body(meta(), meta(), placements=b"\x04\x04", at_most=64),
    "reserved terabyte": body(meta(), placements=b"\x04", at_most=2**40),
    "empty tensor with payload": body(meta(shape=(0,)), placements=b"\x02"),
    "tensor without its payload": body(meta(), placements=b"\x00"),
    "inline without bytes": body(meta(), placements=b"\x01"),
    "terabyte": body(meta(shape=(2**38,))),
    "terabyte in sum": body(*[meta(shape=(2**30,))] * 8),
    "more than memory can have": body(meta(shape=(2**62, 2**62, 2**62))),
    "hidden behind a zero": body(meta(shape=(0, 2**62, 2**62)), placements=b"\x00"),
    "negative extent": body(meta(shape=(-1,))),
    "two negative extents": body(meta(shape=(-1, -3))),
    "extent beyond 64 bits": b"\x94\x91\x93\xa5uint8\x91\xcf"
    + b"\xff" * 8
    + b"\xa3cpu\xc4\x01\x02\xff\xc4\x00",
    "fractional extent": body(meta(shape=(1.5,))),
    "boolean extent": body(meta(shape=(True,))),
    "too many dimensions": body(meta(shape=(1,) * 65)),
    "unknown dtype": body(meta(dtype="float31")),
    "quantized dtype": body(meta(dtype="qint8")),
    "attribute that is no dtype": body(meta(dtype="load")),
    "device that is no name": body(meta(device="../../etc")),
    "device with an index": body(meta(device="cuda:0")),
}


@pytest.mark.parametrize("data", BAD_BODIES.values(), ids=BAD_BODIES)
def test_a_malformed_body_is_refused(data: bytes) -> None:
    prefix = decode_prefix(head(data), CommConfig(), WHERE)
    with pytest.raises(CommError) as caught:
        decode_body(prefix, memoryview(data), CommConfig(), WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert caught.value.operation == WHERE


def test_the_largest_that_fits_the_limits_is_accepted_and_one_more_is_not() -> None:
    data = body(meta(), meta())
    prefix = decode_prefix(head(data), CommConfig(), WHERE)
    decode_body(prefix, memoryview(data), CommConfig(max_message_bytes=24, max_items=2), WHERE)
    for limits in (CommConfig(max_message_bytes=23), CommConfig(max_items=1)):
        with pytest.raises(CommError, match=r"max_message_bytes|length"):
            decode_body(prefix, memoryview(data), limits, WHERE)


@pytest.mark.parametrize(
    "data",
    [
        body(*[meta("", (), "")] * 1_000_000, placements=b""),
        body(meta(shape=(0,) * 4_000_000)),
        body(meta(dtype="f" * 4_000_000)),
    ],
    ids=["a million tensors", "four million dimensions", "a long name"],
)
def test_a_bomb_is_refused_in_proportionate_memory(data: bytes) -> None:
    prefix = decode_prefix(head(data, flags=1), CommConfig(), WHERE)
    tracemalloc.start()
    try:
        with pytest.raises(CommError) as caught:
            decode_body(prefix, memoryview(data), CommConfig(), WHERE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert len(str(caught.value)) < 1000
    assert peak < 2 * len(data) + 100_000


def test_damage_anywhere_in_the_body_is_noticed() -> None:
    data = bytearray(body(meta()))
    prefix = decode_prefix(head(bytes(data)), CommConfig(), WHERE)
    for index in range(len(data)):
        data[index] ^= 1
        with pytest.raises(CommError, match="checksum"):
            decode_body(prefix, memoryview(data), CommConfig(), WHERE)
        data[index] ^= 1
    decode_body(prefix, memoryview(data), CommConfig(), WHERE)


def test_damage_anywhere_in_the_prefix_is_noticed() -> None:
    data = body(meta())
    for index in range(PREFIX_BYTES):
        damaged = bytearray(head(data))
        damaged[index] ^= 1
        with pytest.raises(CommError):
            decode_body(
                decode_prefix(memoryview(damaged), CommConfig(), WHERE), data, CommConfig(), WHERE
            )


@given(data=st.binary(max_size=200), honest=st.booleans())
def test_random_bytes_raise_nothing_else(data: bytes, honest: bool) -> None:
    raw = memoryview(data.ljust(PREFIX_BYTES, b"\x00"))
    try:
        prefix = decode_prefix(head(data) if honest else raw, CommConfig(), WHERE)
        decoded = decode_body(prefix, memoryview(data), CommConfig(), WHERE)
    except CommError as error:
        assert error.kind is ErrorKind.PROTOCOL  # noqa: PT017
    else:
        assert sum(meta.nbytes for meta in decoded.tensors) <= CommConfig().max_message_bytes


@given(
    shape=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
    dtype=st.sampled_from(["uint8", "float64", "complex128"]),
)
def test_what_is_accepted_can_be_allocated(shape: list[int], dtype: str) -> None:
    data = body(meta(dtype, shape), placements=bytes([0 if 0 in shape else 2]))
    limits = CommConfig(max_message_bytes=1 << 20)
    try:
        decoded = decode_body(
            decode_prefix(head(data), limits, WHERE), memoryview(data), limits, WHERE
        )
    except CommError as error:
        assert error.kind is ErrorKind.PROTOCOL  # noqa: PT017
    else:
        assert list(from_meta(decoded.tensors[0], "cpu").shape) == shape
