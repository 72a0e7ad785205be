"""The codec of values: exact round trips, refusals by place, and hostile bytes."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import pickle
import struct
import sys
import tracemalloc
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.tensors import as_bytes, from_meta, meta_of
from commlayer.wire.values import pack, parse, register
from commlayer.wire.values.registered import by_class, by_name

WHERE = "isend_object to rank 1"
LIMITS = CommConfig()
TRUSTING = CommConfig(allow_pickle=True)


@register
@dataclasses.dataclass
class Step:
    number: int
    hidden: Any = None
    started: float = dataclasses.field(default=0.0, init=False)


@register
@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    index: int

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError("negative index")


@register
@dataclasses.dataclass
class Checked:
    tensor: Tensor

    def __post_init__(self) -> None:
        if self.tensor.numel() > 3:
            raise ValueError("too many elements")


@register
class Point(NamedTuple):
    x: int
    y: Any = 5


@register
class Colour(enum.Enum):
    RED = "r"
    GREEN = object()


@register
class Level(enum.IntEnum):
    LOW = 1


@register
class Mode(enum.Flag):
    A = 1
    B = 2
    HIGH = 1 << 70


def travel(value: Any, limits: CommConfig = LIMITS) -> Any:
    """To the other side by way of what really travels: bytes, descriptions, bytes of tensors."""
    data, tensors = pack(value, limits, WHERE)
    parsed = parse(memoryview(data), len(tensors), limits, WHERE)
    received = []
    for tensor in tensors:
        copy = from_meta(meta_of(tensor), "cpu")
        as_bytes(copy).copy_(as_bytes(tensor))
        received.append(copy)
    return parsed.build(received, WHERE)


def same(a: Any, b: Any) -> bool:
    """Equal to the bit: types, order of keys, sign of zero, payload of a NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return meta_of(a) == meta_of(b) and as_bytes(a).tolist() == as_bytes(b).tolist()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, (np.ndarray, np.generic)):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return bool(a == b)


# Round trips -------------------------------------------------------------------------------------

EXAMPLES: list[Any] = [
    None,
    True,
    0,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**5000,
    -(256**9),
    1.0,
    -0.0,
    float("inf"),
    struct.unpack("d", b"\x01\x02\x03\x04\x05\x06\xf8\xff")[0],
    complex(float("nan"), -0.0),
    "",
    "naïve \0 \U0001f40d",
    "lone \ud800 surrogate",
    b"",
    b"\x00\xff",
    [],
    (),
    {},
    set(),
    frozenset(),
    [1, (2, [3, (4,)])],
    {"b": 1, "a": (1, 2), 3: [None], (1, "x"): {}, None: 0, 2.5: 1, b"k": frozenset({(1,), 2})},
    {1: "int", "1": "str", b"1": "bytes"},
    list(range(1000)),
    [2**70, "plain", "\udfff"],
    torch.float32,
    torch.quint8,
    torch.uint4,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([2, 0, 3]),
    torch.Size([]),
    Step(3),
    Step(3, hidden=[Step(4, (1,))]),
    {Key("a", 1): Key("b", 2)},
    Point(1, (2, 3)),
    [Colour.RED, Colour.GREEN, Level.LOW, Mode.A | Mode.HIGH, Mode(0), {Colour.RED: 1}],
    np.arange(6, dtype="<i2").reshape(2, 3),
    np.arange(6).reshape(2, 3).T,
    np.zeros((0, 4), dtype=">f8"),
    np.array(3.5),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([5], dtype="timedelta64[25s]"),
    np.array([True, False]),
    np.array([1 + 2j], dtype=np.complex64),
    np.array([(1, [1.5, 2.5])], dtype=[("a", "i4"), ("b", "f8", (2,))]),
    np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", [("c", "f4"), ("d", "S3")])], align=True)),
    np.zeros(2, dtype=[]),
    np.zeros(1, dtype="V5"),
    np.float32(1.5),
    np.float64("nan"),
    np.int64(-3),
    np.bool_(True),
    np.str_("text"),
    np.str_(""),
    np.str_("ends in NUL\0"),
    np.bytes_(b"x\0"),
    np.void(b"xy\0"),
    np.datetime64("2024-01-01T00:00:00.123"),
    np.timedelta64(3, "h"),
    np.array([(1, 2.0)], dtype="i4,f8")[0],
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_round_trip(value: Any) -> None:
    assert same(travel(value), value)
    nested = {"before": [value], "tensor": torch.ones(2), "after": (value, torch.zeros(1))}
    assert same(travel(nested), nested)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(2**80), max_value=2**80),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=())),
    st.binary(max_size=40),
    st.sampled_from([torch.bfloat16, torch.device("cpu"), torch.Size([1, 2]), Colour.RED, Mode.B]),
    st.builds(Key, st.text(max_size=3), st.integers(min_value=0)),
)
hashables = st.recursive(
    scalars,
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = st.one_of(
    scalars,
    st.builds(torch.full, st.tuples(st.integers(0, 3)), st.integers(0, 9)),
    st.builds(np.full, st.integers(0, 3), st.integers(0, 9)),
    st.builds(np.float32, st.floats(width=32)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(hashables, inner, max_size=4),
        st.sets(hashables, max_size=4),
        st.builds(Step, st.integers(), inner),
        st.builds(Point, st.integers(), inner),
    ),
    max_leaves=20,
)
quick = settings(max_examples=150, suppress_health_check=list(HealthCheck), database=None)


@quick
@given(trees)
def test_round_trip_of_any_tree(value: Any) -> None:
    assert same(travel(value), value)


def test_a_tensor_that_occurs_twice_is_sent_once() -> None:
    shared, other = torch.ones(2), torch.ones(2)
    data, tensors = pack({"a": shared, "b": [shared, other]}, LIMITS, WHERE)
    assert len(tensors) == 2
    value = parse(data, 2, LIMITS, WHERE).build(tensors, WHERE)
    assert value["a"] is value["b"][0]
    assert value["a"] is not value["b"][1]


def test_tensors_are_ready_to_send() -> None:
    value = [torch.arange(6.0).reshape(2, 3).t(), torch.nn.Parameter(torch.ones(2))]
    _, tensors = pack(value, LIMITS, WHERE)
    assert all(type(t) is Tensor and t.is_contiguous() and not t.requires_grad for t in tensors)


def test_fields_set_after_construction_travel() -> None:
    step = Step(1, hidden=torch.ones(1))
    step.started = 2.5
    assert travel(step).started == 2.5


def test_arrays_arrive_writable() -> None:
    array = travel(np.zeros(3))
    array[0] = 1
    assert array.tolist() == [1, 0, 0]


# Registration ------------------------------------------------------------------------------------


@pytest.fixture
def clean_registry() -> Iterator[None]:
    saved = dict(by_name), dict(by_class)
    yield
    for table, content in zip((by_name, by_class), saved, strict=True):
        table.clear()
        table.update(content)


@pytest.mark.usefixtures("clean_registry")
def test_registering_again_is_allowed_and_a_taken_name_is_not() -> None:
    register(Step)
    register(Step, "step")
    with pytest.raises(ValueError, match="'step' is registered for"):
        register(Key, "step")


@pytest.mark.parametrize(
    "cls",
    [int, OrderedDict, type("Plain", (), {}), tuple],
)
def test_only_classes_with_known_fields_can_be_registered(cls: type) -> None:
    with pytest.raises(ValueError, match="neither a dataclass, a named tuple nor an enum"):
        register(cls)


def test_a_dataclass_that_its_fields_cannot_rebuild_is_refused() -> None:
    @dataclasses.dataclass
    class Seeded:
        seed: dataclasses.InitVar[int]

    @dataclasses.dataclass(init=False)
    class Own:
        number: int

        def __init__(self) -> None:
            self.number = 1

    for cls, field in ((Seeded, "seed"), (Own, "number")):
        with pytest.raises(ValueError, match=f"cannot be called with its fields: '{field}'"):
            register(cls)


# Refusals on the sender --------------------------------------------------------------------------


class Text(str):
    __slots__ = ()


class Unregistered(enum.IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "x y")
cycle: list[Any] = [1]
cycle.append({"again": cycle})
wide: Any = "leaf"
for _ in range(40):
    wide = [wide, wide]
deep: Any = []
for _ in range(10_000):
    deep = [deep]

REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"a": [1, 2, (object(),)]}, "value['a'][2][0] is of type object"),
    "function": ([test_round_trip], "value[0] is of type function"),
    "beside a long key": ({10**5000: object()}, "value[<int>] is of type object"),
    "symbolic key": ({object(): 1}, "is of type object"),
    "str subclass": ([Text("x")], "test_values.Text"),
    "range": (range(3), "value is of type range"),
    "named tuple": ({"p": Pair(1, 2)}, "test_values.Pair"),
    "int enum": ([Unregistered.ONE], "test_values.Unregistered"),
    "bytearray": ([bytearray(b"x")], "is of type bytearray"),
    "memoryview": ([memoryview(b"x")], "is of type memoryview"),
    "codec's own token": ([Ext(1, b"")], "Ext"),
    "field": (Step(1, hidden=[object()]), "value.hidden[0] is of type object"),
    "object array": (np.array([None]), "holds Python objects"),
    "object field": (np.zeros(1, dtype=[("a", "O")]), "holds Python objects"),
    "record": (np.rec.array([(1, 2)]), "numpy.rec"),
    "titled field": (np.zeros(1, dtype=[(("title", "a"), "i4")]), "has a title"),
    "masked": (np.ma.array([1], mask=[True]), "MaskedArray"),
    "matrix": (np.array([[1]]).view(np.matrix), "matrix"),
    "cycle": (cycle, "is reached again inside itself"),
    "deep": (deep, "is nested deeper than max_depth = 64"),
    "shared bomb": (wide, "has more than max_items"),
    "many": ([0] * 100_001, "has more than max_items"),
    "many keys": (dict.fromkeys(range(60_000)), "has more than max_items"),
    "large bytes": ({"b": b"\0" * (17 << 20)}, "value['b'] has 17825792 bytes"),
    "large text": ("x" * (17 << 20), "more than max_header_bytes"),
    "large integer": (1 << (18 << 23), "more than max_header_bytes"),
    "large array": ([np.zeros(3 << 20)], "more than max_header_bytes"),
    "sparse": ({"t": [torch.eye(2).to_sparse()]}, "value['t'][0] cannot be sent"),
    "meta": ({"t": torch.empty(2, device="meta")}, "value['t'] cannot be sent"),
    "tensor as key": ({torch.ones(1): 1}, "has a tensor in a key or in a set"),
    "tensor in a set": ([{torch.ones(1)}], "value[0] has a tensor in a key or in a set"),
    "tensor inside a key": ({(1, torch.ones(1)): 1}, "has a tensor in a key or in a set"),
    "tensors": (torch.empty(1).expand(1 << 20), "max_message_bytes"),
}


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("value", "cause"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_before_anything_leaves(value: Any, cause: str) -> None:
    with pytest.raises(CommError) as caught:
        pack(value, msgspec.structs.replace(LIMITS, max_message_bytes=1 << 20), WHERE)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.operation == WHERE
    assert cause in caught.value.cause
    assert caught.value.cure
    assert len(str(caught.value)) < 1000


def test_the_cure_is_the_fitting_one() -> None:
    for value, cure in (
        (Pair(1, 2), "Register the class"),
        (Unregistered.ONE, "Register the class"),
        (bytearray(), "bytes(...)"),
        (object(), "allow_pickle"),
    ):
        with pytest.raises(CommError) as caught:
            pack(value, LIMITS, WHERE)
        assert cure in caught.value.cure


def test_limits_are_inclusive_and_agree_on_both_sides() -> None:
    limits = CommConfig(max_depth=3, max_items=5)
    assert travel([[[1, 2]]], limits) == [[[1, 2]]]
    data, _ = pack([[[[1]]]], LIMITS, WHERE)
    with pytest.raises(CommError, match="deeper than max_depth = 3"):
        parse(data, 0, limits, WHERE)
    assert travel([1, 2, 3, 4], limits) == [1, 2, 3, 4]
    data, _ = pack([1, 2, 3, 4, 5], LIMITS, WHERE)
    with pytest.raises(CommError, match="length <= 5"):
        parse(data, 0, limits, WHERE)
    with pytest.raises(CommError, match="max_items = 5"):
        pack([1, 2, 3, 4, 5], limits, WHERE)
    assert travel([[Level.LOW]], limits) == [[Level.LOW]]
    with pytest.raises(CommError, match="max_depth = 3"):
        pack([[[Level.LOW]]], limits, WHERE)


def test_a_short_stack_is_an_error_of_the_operation() -> None:
    limits = CommConfig(max_depth=200)
    nested: Any = 1
    for _ in range(200):
        nested = [nested]
    data, _ = pack(nested, limits, WHERE)

    def deep_in_the_stack(levels: int) -> None:
        if levels:
            deep_in_the_stack(levels - 1)
            return
        with pytest.raises(CommError, match="stack") as caught:
            pack(nested, limits, WHERE)
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        with pytest.raises(CommError, match="stack") as caught:
            parse(data, 0, limits, WHERE).build([], WHERE)
        assert caught.value.kind is ErrorKind.PROTOCOL

    old = sys.getrecursionlimit()
    used = len(inspect.stack())
    sys.setrecursionlimit(used + 400)
    try:
        deep_in_the_stack(150)
    finally:
        sys.setrecursionlimit(old)


# Pickle ------------------------------------------------------------------------------------------


class Alarm:
    """Running its pickle is seen."""

    rung = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return ring, ()


def ring() -> str:
    Alarm.rung += 1
    return "rung"


def test_pickle_needs_the_consent_of_both_sides() -> None:
    before = Alarm.rung
    with pytest.raises(CommError, match="cannot be sent"):
        pack({"a": Alarm()}, LIMITS, WHERE)
    data, _ = pack({"a": Alarm(), "b": 1}, TRUSTING, WHERE)
    with pytest.raises(CommError, match="allow_pickle is off") as caught:
        parse(data, 0, LIMITS, WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert Alarm.rung == before
    assert parse(data, 0, TRUSTING, WHERE).build([], WHERE) == {"a": "rung", "b": 1}
    assert Alarm.rung == before + 1


def test_only_the_unknown_leaf_is_pickled() -> None:
    tensor = torch.ones(2)
    data, tensors = pack({"t": tensor, "o": bytearray(b"x")}, TRUSTING, WHERE)
    assert tensors == [tensor]
    value = parse(data, 1, TRUSTING, WHERE).build(tensors, WHERE)
    assert value["t"] is tensor
    assert value["o"] == bytearray(b"x")


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CommError, match=r"value\['f'\] cannot be pickled"):
        pack({"f": lambda: 1}, TRUSTING, WHERE)


# Hostile bytes -----------------------------------------------------------------------------------


def tokens(*items: Any) -> bytes:
    return msgspec.msgpack.encode(list(items))


def four(number: int) -> bytes:
    return number.to_bytes(4, "big")


def container(code: int, count: int, name: str = "") -> Ext:
    return Ext(code, four(count) + name.encode())


LIST, TUPLE, SET, FROZENSET, SIZE, DICT, OBJECT, MEMBER, TENSOR = range(1, 10)
ARRAY, SCALAR, BYTES, TEXT, INTEGER, COMPLEX, DTYPE, DEVICE, PICKLE = range(10, 19)
STEP, COLOUR = (f"{Step.__module__}.{name}" for name in ("Step", "Colour"))

HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "no value": tokens(),
    "not an array": b"\x01",
    "native map": b"\x91\x81\xa1a\x01",
    "native array": b"\x91\x91\x01",
    "native bytes": b"\x91\xc4\x01a",
    "timestamp": b"\x91\xd6\xff\0\0\0\0",
    "invalid opcode": b"\x91\xc1",
    "array of 2**32": b"\xdd\xff\xff\xff\xff\x01\x02\x03\x04\x05",
    "text of 2**32": b"\x91\xdb\xff\xff\xff\xffaa",
    "extension of 2**32": b"\x91\xc9\xff\xff\xff\xff\x01aa",
    "bad utf-8": b"\x91\xa1\xff",
    "nested arrays": b"\x91" * 100_000,
    "nested maps": b"\x91" + b"\x81\xa1a" * 100_000,
    "a million keys": tokens(container(DICT, 500_000), *range(1_000_000)),
    "ten thousand levels": tokens(*[container(LIST, 1)] * 10_000, 1),
    "levels of members": tokens(*[container(MEMBER, 1, COLOUR)] * 10_000, "RED"),
    "levels of arrays": tokens(*[container(ARRAY, 3)] * 10_000, 1),
    "levels of fields": tokens(*[container(OBJECT, 1, STEP), "number"] * 10_000, 1),
    "list of 2**32": tokens(container(LIST, 2**32 - 1), 1),
    "list too long": tokens(container(LIST, 2), 1),
    "list too short": tokens(container(LIST, 1), 1, 2),
    "two values": tokens(1, 2),
    "unknown code": tokens(Ext(99, b"")),
    "count of three bytes": tokens(Ext(LIST, b"\0\0\0")),
    "unhashable key": tokens(container(DICT, 1), container(LIST, 0), 1),
    "unhashable member": tokens(container(SET, 1), container(DICT, 0)),
    "key twice": tokens(container(DICT, 2), 1, 1.0, 2, 3),
    "member twice": tokens(container(FROZENSET, 2), 1, 1),
    "values missing": tokens(container(DICT, 1), 1),
    "equal hashes": tokens(
        container(SET, 5000),
        *(
            Ext(INTEGER, (7 + (2**61 - 1) * n).to_bytes(16, "big", signed=True))
            for n in range(5000)
        ),
    ),
    "negative extent of size": tokens(container(SIZE, 1), "x"),
    "extent of 2**63": tokens(container(SIZE, 1), 2**63),
    "unknown class": tokens(container(OBJECT, 0, "os.system")),
    "class is an enum": tokens(container(OBJECT, 1, COLOUR), "value", "r"),
    "enum is a class": tokens(container(MEMBER, 1, STEP), "number"),
    "unknown member": tokens(container(MEMBER, 1, COLOUR), "__class__"),
    "member by number": tokens(container(MEMBER, 1, COLOUR), 1),
    "impossible flag": tokens(container(MEMBER, 1, f"{Mode.__module__}.Mode"), 1 << 40),
    "member is missing": tokens(container(MEMBER, 1, COLOUR)),
    "unknown field": tokens(container(OBJECT, 2, STEP), "number", "__class__", 1, 2),
    "field twice": tokens(container(OBJECT, 2, STEP), "number", "number", 1, 2),
    "field without name": tokens(container(OBJECT, 1, STEP), 1, 1),
    "required field missing": tokens(container(OBJECT, 1, STEP), "hidden", 1),
    "refused by its class": tokens(
        container(OBJECT, 2, f"{Key.__module__}.Key"), "name", "index", "a", -1
    ),
    "name not utf-8": tokens(Ext(OBJECT, four(0) + b"\xff")),
    "text not utf-8": tokens(Ext(TEXT, b"\xff")),
    "short complex": tokens(Ext(COMPLEX, b"\0" * 15)),
    "unknown dtype": tokens(Ext(DTYPE, b"load")),
    "unknown device": tokens(Ext(DEVICE, b"nowhere")),
    "device with a path": tokens(Ext(DEVICE, b"cuda:0/../x")),
    "tensor out of range": tokens(Ext(TENSOR, four(0))),
    "pickle": tokens(Ext(PICKLE, pickle.dumps(Alarm()))),
    "object array": tokens(container(ARRAY, 3), "|O", container(TUPLE, 0), Ext(BYTES, b"\0" * 8)),
    "dtype by comma": tokens(container(ARRAY, 3), "i4,i4", container(TUPLE, 0), Ext(BYTES, b"")),
    "division by zero": tokens(
        container(ARRAY, 3), "<M8[s/0]", container(TUPLE, 0), Ext(BYTES, b"\0" * 8)
    ),
    "short array": tokens(
        container(ARRAY, 3), "<i4", container(TUPLE, 1), 2**40, Ext(BYTES, b"\0" * 8)
    ),
    "negative array": tokens(
        container(ARRAY, 3), "<i4", container(TUPLE, 2), -1, -2, Ext(BYTES, b"\0" * 8)
    ),
    "empty elements without end": tokens(
        container(ARRAY, 3), "|V0", container(TUPLE, 1), 2**40, Ext(BYTES, b"")
    ),
    "array of an impossible dtype": tokens(
        container(ARRAY, 3), container(TUPLE, 2), 4, 5, container(TUPLE, 0), Ext(BYTES, b"")
    ),
    "scalar of an object": tokens(container(SCALAR, 2), "|O", Ext(BYTES, b"\0" * 8)),
    "text out of range": tokens(container(SCALAR, 2), "<U1", Ext(BYTES, b"\xff" * 4)),
    "array of two parts": tokens(container(ARRAY, 2), "<i4", container(TUPLE, 0)),
}


OF_ANOTHER_VERSION = {
    "unhashable key",
    "unhashable member",
    "key twice",
    "member twice",
    "unknown class",
    "class is an enum",
    "enum is a class",
    "unknown member",
    "member by number",
    "impossible flag",
    "unknown field",
    "required field missing",
    "refused by its class",
    "unknown dtype",
    "unknown device",
    "device with a path",
}
"""What a sender can mean rightly whose classes, or torch, are not those of this rank."""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_in_proportionate_memory(name: str) -> None:
    data = HOSTILE[name]
    before = Alarm.rung
    tracemalloc.start()
    try:
        with pytest.raises(CommError) as caught:
            parse(data, 0, LIMITS, WHERE).build([], WHERE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert caught.value.operation == WHERE
    assert caught.value.cure
    assert len(str(caught.value)) < 1000
    assert ("later ones are not" in caught.value.cure) == (name in OF_ANOTHER_VERSION)
    assert Alarm.rung == before
    assert peak < 100 * len(data) + 1_000_000


def test_tensors_and_value_must_agree() -> None:
    data, tensors = pack([torch.ones(1), torch.ones(2)], LIMITS, WHERE)
    for count in (0, 1, 3):
        with pytest.raises(CommError) as caught:
            parse(data, count, LIMITS, WHERE)
        assert caught.value.kind is ErrorKind.PROTOCOL
    parse(data, len(tensors), LIMITS, WHERE)


@pytest.mark.parametrize(
    "data",
    [
        tokens(container(SET, 1), Ext(TENSOR, four(0))),
        tokens(container(DICT, 1), container(TUPLE, 1), Ext(TENSOR, four(0)), 1),
        tokens(container(SIZE, 1), Ext(TENSOR, four(0))),
        tokens(container(ARRAY, 3), "<i4", Ext(TENSOR, four(0)), Ext(BYTES, b"")),
        tokens(container(MEMBER, 1, COLOUR), Ext(TENSOR, four(0))),
        tokens(container(OBJECT, 1, STEP), Ext(TENSOR, four(0)), 1),
        tokens(Ext(TENSOR, b"\0")),
    ],
    ids=["member", "key", "extent", "shape", "enum", "field name", "short index"],
)
def test_a_tensor_where_none_may_be_is_refused(data: bytes) -> None:
    with pytest.raises(CommError) as caught:
        parse(data, 1, LIMITS, WHERE).build([torch.ones(1)], WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL


def test_too_large_a_header_is_not_even_read() -> None:
    with pytest.raises(CommError, match="exceed max_header_bytes = 4096"):
        parse(b"\xc1" * 4097, 0, CommConfig(max_header_bytes=4096), WHERE)


def test_a_class_that_refuses_its_tensor_is_a_protocol_error() -> None:
    data, _ = pack([Checked(torch.ones(2))], LIMITS, WHERE)
    with pytest.raises(CommError, match="too many elements") as caught:
        parse(data, 1, LIMITS, WHERE).build([torch.ones(4)], WHERE)
    assert caught.value.kind is ErrorKind.PROTOCOL


def attempt(data: bytes, tensors: list[Tensor], limits: CommConfig) -> None:
    before = Alarm.rung
    kinds = set()
    try:
        parse(data, len(tensors), limits, WHERE).build(tensors, WHERE)
    except CommError as error:
        kinds.add(error.kind)
    assert kinds <= {ErrorKind.PROTOCOL}
    assert Alarm.rung == before


@quick
@given(trees, st.data())
def test_damaged_bytes_raise_nothing_else(value: Any, draw: st.DataObject) -> None:
    data, tensors = pack([value, Alarm()], TRUSTING, WHERE)
    limits = msgspec.structs.replace(LIMITS, max_items=1000)
    for _ in range(10):
        damaged = bytearray(data[: draw.draw(st.integers(0, len(data)))])
        for _ in range(draw.draw(st.integers(0, 3)) if damaged else 0):
            damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
        attempt(bytes(damaged), tensors, limits)


@quick
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(data: bytes) -> None:
    attempt(data, [], LIMITS)


any_token = st.one_of(
    scalars.filter(lambda value: type(value) in (type(None), bool, float))
    | st.integers(-3, 3)
    | st.sampled_from(["number", "hidden", "RED", "<i4", "|b1", ""]),
    st.builds(
        container, st.integers(1, 12), st.integers(0, 3), st.sampled_from(["", STEP, COLOUR])
    ),
    st.builds(container, st.sampled_from([LIST, TUPLE, SET, DICT, ARRAY]), st.integers(0, 3)),
    st.builds(Ext, st.integers(9, 19), st.binary(max_size=8) | st.just(four(0))),
)


@quick
@given(st.lists(any_token, min_size=1, max_size=12))
def test_random_tokens_raise_nothing_else(items: list[Any]) -> None:
    attempt(tokens(*items), [torch.ones(1)], LIMITS)
