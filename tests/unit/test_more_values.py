"""Mappings, types of the standard library, and classes with an encoder of their own."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import pathlib
import types
import uuid
import zoneinfo
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from commlayer_testkit.local import connected

import commlayer
from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.values import pack, parse, register
from commlayer.wire.values.registered import by_class, by_name

WHERE = "isend_object to rank 1"


def travel(value: Any, limits: CommConfig = CommConfig()) -> Any:  # noqa: B008
    data, tensors = pack(value, limits, WHERE)
    return parse(data, len(tensors), limits, WHERE).build(tensors, WHERE)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    saved = dict(by_name), dict(by_class)
    yield
    for table, content in zip((by_name, by_class), saved, strict=True):
        table.clear()
        table.update(content)


# Mappings


class Sub(dict):  # type: ignore[type-arg]
    pass


class Lazy(Mapping[str, Any]):
    """A mapping that is no dict."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


CONTENT = {"b": 1, "a": [2, {"c": 3}]}
MAPPINGS: dict[str, Mapping[str, Any]] = {
    "OrderedDict": collections.OrderedDict(CONTENT),
    "mappingproxy": types.MappingProxyType(CONTENT),
    "defaultdict": collections.defaultdict(list, CONTENT),
    "Counter": collections.Counter({"b": 1, "a": 2}),
    "ChainMap": collections.ChainMap(CONTENT, {"z": 1}),
    "subclass": Sub(CONTENT),
    "own": Lazy(CONTENT),
}


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("value", MAPPINGS.values(), ids=MAPPINGS)
def test_a_mapping_arrives_as_a_dict_in_its_order(
    value: Mapping[str, Any], allow_pickle: bool
) -> None:
    limits = CommConfig(allow_pickle=allow_pickle)
    for got in (travel(value, limits), travel([value], limits)[0], travel({1: value}, limits)[1]):
        assert type(got) is dict
        assert list(got.items()) == list(value.items())


def test_mappings_are_tensor_dicts() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = model.state_dict()
    with connected(inline_bytes=16) as (a, b):
        values = [state, types.MappingProxyType(dict(state)), Lazy(dict(state)), dict(state)]
        for value in values:
            a.isend_tensor_dict(value, 1)
            a.broadcast_tensor_dict(value, 0, async_op=True)
            for received in (b.recv_tensor_dict(0), b.broadcast_tensor_dict(None, 0)):
                assert list(received) == list(state)
                assert all(torch.equal(received[key], state[key]) for key in state)
        model.load_state_dict(received)
        for wrong in (collections.OrderedDict({1: 2}), Lazy({None: 1})):  # type: ignore[dict-item]
            with pytest.raises(CommError, match="keys are str"):
                a.isend_tensor_dict(wrong, 1)


# The standard library


STANDARD: list[Any] = [
    collections.deque([1, "x"]),
    collections.deque([1, [2]], maxlen=5),
    dt.date(2024, 2, 29),
    dt.time(23, 59, 58, 999_999),
    dt.time(1, 2, tzinfo=dt.timezone.utc),
    dt.datetime(1, 1, 1),
    dt.datetime(2024, 2, 29, 1, 2, 3, 4, fold=1),
    dt.datetime(2024, 2, 29, tzinfo=dt.timezone.utc),
    dt.datetime(2024, 2, 29, tzinfo=dt.timezone(dt.timedelta(hours=-5, minutes=30), "X")),
    dt.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    dt.timedelta(days=-3, seconds=5, microseconds=7),
    dt.timedelta.max,
    dt.timezone.utc,
    uuid.UUID("12345678-1234-5678-1234-567812345678"),
    pathlib.Path("/models/llama"),
    pathlib.Path("relative"),
    pathlib.PurePosixPath("/x"),
    pathlib.PureWindowsPath("C:\\x"),
    decimal.Decimal("1.10"),
    decimal.Decimal("-Infinity"),
    decimal.Decimal("1E+30"),
    np.int64(5),
    np.uint8(255),
]


@pytest.mark.parametrize("value", STANDARD, ids=repr)
def test_types_of_the_standard_library(value: Any) -> None:
    for got in (travel(value), travel([value, torch.ones(1)])[0], travel({"k": value})["k"]):
        assert type(got) is type(value)
        assert got == value
        assert repr(got) == repr(value)
        assert getattr(got, "fold", 0) == getattr(value, "fold", 0)
        assert getattr(got, "maxlen", 0) == getattr(value, "maxlen", 0)


def test_as_keys_and_with_tensors_inside() -> None:
    key = uuid.uuid4()
    assert travel({key: 1, dt.date(2024, 1, 1): 2}) == {key: 1, dt.date(2024, 1, 1): 2}
    tensor = torch.ones(3)
    got = travel(collections.deque([tensor, 1], maxlen=4))
    assert got[0] is tensor
    assert got.maxlen == 4


def test_a_signalling_decimal_keeps_its_sign() -> None:
    got = travel(decimal.Decimal("-sNaN123"))
    assert str(got) == "-sNaN123"


class OwnZone(dt.tzinfo):
    pass


def test_what_they_cannot_say_is_refused_by_place() -> None:
    with pytest.raises(CommError, match=r"value\[0\].*OwnZone"):
        travel([dt.datetime(2024, 1, 1, tzinfo=OwnZone())])
    with pytest.raises(CommError, match="is of type"):
        travel(type("Stamp", (dt.datetime,), {})(2024, 1, 1))


# Encoders of one's own


class Request:
    """A plain class, as engines have them."""

    def __init__(self, name: str, tokens: Any) -> None:
        self.name = name
        self.tokens = tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def known(**functions: Any) -> None:
    chosen = {"encode": lambda r: (r.name, r.tokens), "decode": lambda v: Request(*v)}
    commlayer.register(Request, "test.Request", **{**chosen, **functions})


def test_any_class_travels_by_its_encoder() -> None:
    known()
    tensor = torch.arange(3)
    got = travel([Request("r", tensor), {Request("k", None): 1}])
    assert type(got[0]) is Request
    assert got[0].name == "r"
    assert got[0].tokens is tensor
    assert got[1] == {Request("k", None): 1}
    nested = travel(Request("outer", [Request("inner", tensor)]))
    assert nested.tokens[0].tokens is tensor


def test_a_builtin_type_of_another_class_can_be_registered() -> None:
    commlayer.register(
        range, encode=lambda r: (r.start, r.stop, r.step), decode=lambda v: range(*v)
    )
    assert travel([range(1, 9)]) == [range(1, 9)]
    ordered = collections.OrderedDict
    commlayer.register(ordered, encode=lambda d: list(d.items()), decode=ordered)
    assert type(travel(ordered(a=1))) is ordered


def test_a_tensor_subclass_travels_as_itself_if_it_has_an_encoder() -> None:
    class Named(torch.Tensor):
        pass

    commlayer.register(
        Named,
        "test.Named",
        encode=lambda t: t.as_subclass(torch.Tensor),
        decode=lambda t: t.as_subclass(Named),
    )
    got = travel([torch.ones(3).as_subclass(Named)])[0]
    assert type(got) is Named


def boom(*_: Any) -> Any:
    raise ZeroDivisionError("boom")


@pytest.mark.parametrize(
    ("encode", "cause"),
    [
        (boom, "ZeroDivisionError: boom"),
        (lambda r: r, "reached again inside itself"),
        (lambda r: object(), "is of type object"),
        (lambda r: iter([1]), "is of type list_iterator"),
        (lambda r: {torch.ones(1): 1}, "tensor in a key"),
    ],
    ids=["raises", "itself", "object", "iterator", "tensor as a key"],
)
def test_an_encoder_that_raises_or_returns_nonsense(encode: Any, cause: str) -> None:
    known(encode=encode)
    for allow_pickle in (False,):
        with pytest.raises(CommError, match=cause) as caught:
            travel({"a": [Request("r", 1)]}, CommConfig(allow_pickle=allow_pickle))
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert "value['a'][0]" in caught.value.cause
        assert caught.value.cure


@pytest.mark.parametrize(
    ("decode", "cause"),
    [(boom, "boom"), (lambda v: None, "returned None"), (lambda v: v, r"returned \('r', ")],
    ids=["raises", "nothing", "what came"],
)
@pytest.mark.parametrize("inside", [1, torch.ones(2)], ids=["plain", "tensor"])
def test_a_decoder_that_raises_or_returns_nonsense(decode: Any, cause: str, inside: Any) -> None:
    known(decode=decode)
    with pytest.raises(CommError, match=cause) as caught:
        travel([Request("r", inside)])
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert "later ones are not" in caught.value.cure


def test_what_an_encoder_refuses_never_leaves_and_the_lane_goes_on() -> None:
    known(encode=lambda r: boom() if r.name == "bad" else (r.name, r.tokens))
    with connected() as (a, b):
        for call in (
            lambda: a.isend_object(Request("bad", 1), 1),
            lambda: a.isend_tensor_dict({"x": Request("bad", 1)}, 1),
            lambda: a.broadcast_object([Request("bad", 1)], 0),
        ):
            with pytest.raises(CommError, match="boom"):
                call()
        assert a.ledger.snapshot().operations == ()
        a.isend_object(Request("good", 1), 1)
        assert b.recv_object(0).name == "good"


class Sour:
    """Cannot be read."""

    @property
    def number(self) -> int:
        raise ZeroDivisionError("sour")


class SourMapping(Lazy):
    def __iter__(self) -> Iterator[str]:
        raise ZeroDivisionError("sour")


class Liar(Lazy):
    def __len__(self) -> int:
        return 7


class SourItem:
    def __reduce__(self) -> Any:
        raise ZeroDivisionError("sour")


@dataclasses.dataclass
class Sweet:
    number: int


def test_user_code_that_raises_while_it_is_read_is_a_refusal() -> None:
    sour = Sour()
    sour.__class__ = type("SourData", (Sour, Sweet), {})
    register(type(sour), "test.SourData")
    for value in (sour, SourMapping({"a": 1}), SourItem()):
        for wrapped in (value, [value], {"a": (value,)}):
            with pytest.raises(CommError, match="sour") as caught:
                travel(wrapped, CommConfig(allow_pickle=True))
            assert caught.value.kind is ErrorKind.UNSUPPORTED
            assert caught.value.cure
    assert travel(Liar({"a": 1})) == {"a": 1}
    with connected() as (a, b):
        with pytest.raises(CommError, match="sour"):
            a.isend_tensor_dict(SourMapping({"a": 1}), 1)
        a.isend_tensor_dict(Liar({"a": 1}), 1)
        assert b.recv_tensor_dict(0) == {"a": 1}


# Struct and models


class Meta(msgspec.Struct, kw_only=True):
    request: int
    name: str = "x"
    extra: Any = None
    many: list[int] = msgspec.field(default_factory=list)


class Frozen(msgspec.Struct, frozen=True):
    number: int


def test_a_struct_travels_once_registered() -> None:
    with pytest.raises(CommError, match="Meta, which cannot be sent") as caught:
        travel(Meta(request=1))
    assert "commlayer.register" in caught.value.cure
    register(Meta)
    register(Frozen, "test.Frozen")
    tensor = torch.ones(2)
    got = travel([Meta(request=1, extra=tensor, many=[3]), {Frozen(1): Frozen(2)}])
    assert type(got[0]) is Meta
    assert got[0].extra is tensor
    assert (got[0].request, got[0].name, got[0].many) == (1, "x", [3])
    assert got[1] == {Frozen(1): Frozen(2)}


pydantic = pytest.importorskip("pydantic")


class Inner(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    number: int


class Model(pydantic.BaseModel):  # type: ignore[misc, name-defined]
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    request: int
    inner: Inner | None = None
    hidden: torch.Tensor | None = None
    aliased: str = pydantic.Field("y", alias="Aliased")

    @pydantic.field_validator("request")
    @classmethod
    def positive(cls, value: int) -> int:
        if value < 0:
            raise ValueError("negative request")
        return value


def test_a_model_travels_once_registered_and_is_validated_again() -> None:
    with pytest.raises(CommError, match="Model, which cannot be sent") as caught:
        travel(Model(request=1))
    assert "commlayer.register" in caught.value.cure
    register(Model)
    register(Inner)
    tensor = torch.ones(2)
    sent = Model(request=3, inner=Inner(number=4), hidden=tensor, Aliased="z")
    got = travel([sent])[0]
    assert type(got) is Model
    assert got.hidden is tensor
    assert (got.request, got.inner, got.aliased) == (3, Inner(number=4), "z")
    bad = Model.model_construct(request=-1, inner=None, hidden=None, aliased="q")
    with pytest.raises(CommError, match="negative request") as caught:
        travel(bad)
    assert caught.value.kind is ErrorKind.PROTOCOL


# Registering


def test_what_cannot_be_registered() -> None:
    for cls in (dict, list, int, str, torch.Tensor, type(None)):
        with pytest.raises(ValueError, match="travel already"):
            commlayer.register(cls, encode=repr, decode=eval)
    with pytest.raises(ValueError, match="both"):
        commlayer.register(Request, encode=repr)
    with pytest.raises(ValueError, match="both"):
        commlayer.register(Request, decode=repr)
    with pytest.raises(ValueError, match="encode and decode"):
        commlayer.register(Request)
    with pytest.raises(ValueError, match="not a class"):
        commlayer.register(Request("x", 1))  # type: ignore[type-var]
    with pytest.raises(ValueError, match="not a function"):
        commlayer.register(Request, encode=1, decode=repr)


def test_the_cure_names_encoders() -> None:
    with pytest.raises(CommError) as caught:
        travel(Request("x", 1))
    assert "encode" in caught.value.cure


def test_an_encoder_on_one_rank_only_fails_the_message() -> None:
    known()
    data, _ = pack(Request("x", 1), CommConfig(), WHERE)
    register(Sweet, "test.Request2")
    by_name["test.Request"] = by_name["test.Request2"]
    with pytest.raises(CommError, match="later ones are not"):
        parse(data, 0, CommConfig(), WHERE).build([], WHERE)
    data, _ = pack(Sweet(1), CommConfig(), WHERE)
    del by_name["test.Request"]
    known()
    by_name["test.Request2"] = by_name["test.Request"]
    with pytest.raises(CommError, match="later ones are not"):
        parse(data, 0, CommConfig(), WHERE).build([], WHERE)
