"""One bad message fails its own receive; the lane, its sender and everybody else go on."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from commlayer_testkit.local import WAITED, connected

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.values import register
from commlayer.wire.values.registered import by_class, by_name

INLINE = 64


@pytest.fixture
def registry() -> Iterator[None]:
    saved = dict(by_name), dict(by_class)
    yield
    for table, content in zip((by_name, by_class), saved, strict=True):
        table.clear()
        table.update(content)


@dataclasses.dataclass
class Meta:
    request: int
    priority: Any = 0


@dataclasses.dataclass
class OlderMeta:
    request: int


@dataclasses.dataclass
class StrictMeta:
    request: int
    priority: Any = 0

    def __post_init__(self) -> None:
        raise ZeroDivisionError("this rank's constructor does not like it")


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class OlderColour(enum.Enum):
    RED = 1


class Sulking:
    """Arrives in a process that cannot load it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sulk, ()


def sulk() -> None:
    raise ImportError("no module of that name here")


def receiver_has(sender: type, receiver: type | None) -> None:
    """Register `sender` where values are packed, and `receiver` in its place where they arrive."""
    register(sender, "bad.Class")
    if receiver is None:
        del by_name["bad.Class"]
    else:
        register(receiver, "bad.Other")
        by_name["bad.Class"] = by_name["bad.Other"]


BAD: dict[str, tuple[Callable[[], None], Callable[[Any], Any], str]] = {
    "unknown class": (lambda: receiver_has(Meta, None), lambda x: Meta(1, x), "not registered"),
    "another field": (
        lambda: receiver_has(Meta, OlderMeta),
        lambda x: Meta(1, x),
        "'priority'",
    ),
    "a constructor that raises": (
        lambda: receiver_has(Meta, StrictMeta),
        lambda x: Meta(1, x),
        "does not like it",
    ),
    "unknown member": (
        lambda: receiver_has(Colour, OlderColour),
        lambda x: [Colour.GREEN, x],
        "no member",
    ),
    "a class that is an enum": (
        lambda: receiver_has(Meta, OlderColour),
        lambda x: Meta(1, x),
        "has no fields",
    ),
    "unpicklable": (lambda: None, lambda x: [Sulking(), x], "no module of that name"),
}


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("elements", [None, 2, 500], ids=["plain", "inline", "large"])
@pytest.mark.parametrize("call", ["object", "dict", "broadcast"])
@pytest.mark.parametrize(("prepare", "make", "cause"), BAD.values(), ids=BAD)
def test_a_value_that_cannot_be_made_fails_its_receive_only(
    prepare: Callable[[], None],
    make: Callable[[Any], Any],
    cause: str,
    call: str,
    elements: int | None,
) -> None:
    prepare()
    with connected(inline_bytes=INLINE, allow_pickle=True) as (a, b):
        sends, outcomes = [], []
        for number in range(12):
            tensor = None if elements is None else torch.full((elements,), float(number))
            bad = number % 3 == 1
            value = make(tensor) if bad else {"n": number, "t": tensor}
            if call == "object":
                sends.append(a.isend_object(value, 1))
                receive = b.irecv_object(0)
            elif call == "dict":
                sends.append(a.isend_tensor_dict({"v": value}, 1))
                receive = b.irecv_tensor_dict(0)
            else:
                sends.append(a.broadcast_object(value, 0, async_op=True))
                receive = b.broadcast_object(None, 0, async_op=True)
            if bad:
                with pytest.raises(CommError, match=cause) as caught:
                    receive.wait(60)
                outcomes.append(caught.value)
            else:
                got = receive.result(60)
                got = got["v"] if call == "dict" else got
                assert got["n"] == number
                assert elements is None or got["t"].sum() == number * elements
        for send in sends:
            send.wait(60)
        for number, error in enumerate(outcomes):
            assert error.kind is ErrorKind.PROTOCOL
            assert error.peer == 0
            assert error.sequence == 3 * number + 1
            assert "later ones are not" in error.cure
        b.isend_object("and back", 0)
        assert a.recv_object(1) == "and back"
        a.close(30)
        b.close(30)


@pytest.mark.usefixtures("registry")
def test_values_that_arrive_before_they_are_asked_for_fail_alike() -> None:
    receiver_has(Meta, OlderMeta)
    with connected(inline_bytes=INLINE) as (a, b):
        a.isend_object("opens the lane", 1)
        b.recv_object(0)
        sends = [a.isend_object(Meta(n) if n % 2 else n, 1) for n in range(6)]
        for send in sends:
            send.wait(60)
        for number in range(6):
            receive = b.irecv_object(0)
            if number % 2:
                with pytest.raises(CommError, match="'priority'"):
                    receive.wait(60)
            else:
                assert receive.result(60) == number


# Memory that is short


def short_of(monkeypatch: pytest.MonkeyPatch, limit: int) -> Callable[[], None]:
    """Refuse tensors of more than `limit` bytes until the returned function is called."""
    from commlayer.lanes import payload

    made = payload.from_meta
    state = {"short": True}

    def allocate(meta: Any, device: Any) -> Any:
        if state["short"] and meta.nbytes > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return made(meta, device)

    monkeypatch.setattr(payload, "from_meta", allocate)
    return lambda: state.update(short=False)


@pytest.mark.parametrize("call", ["tensor", "object", "dict"])
def test_a_message_without_room_fails_its_receive_only(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(comm: Communicator, n: int) -> Any:
        tensor = torch.full((n,), float(n))
        if call == "tensor":
            return comm.isend(tensor, 1)
        if call == "object":
            return comm.isend_object([tensor, n], 1)
        return comm.isend_tensor_dict({"t": tensor}, 1)

    def receive(comm: Communicator) -> Any:
        if call == "tensor":
            return comm.irecv(None, 0)
        return comm.irecv_object(0) if call == "object" else comm.irecv_tensor_dict(0)

    relieve = short_of(monkeypatch, 20_000)
    with connected(inline_bytes=INLINE, semantics=WAITED) as (a, b):
        sizes = [100, 10_000, 3, 20_000, 5]
        sends = [send(a, n) for n in sizes]
        for n in sizes:
            handle = receive(b)
            if n < 10_000:
                value = handle.result(60)
                got = value if call == "tensor" else value[0] if call == "object" else value["t"]
                assert got.sum() == n * n
            else:
                with pytest.raises(CommError, match="no memory") as caught:
                    handle.wait(60)
                assert caught.value.kind is ErrorKind.PROTOCOL
                assert "later ones are not" in caught.value.cure
        relieve()
        last = send(a, 40_000)
        value = receive(b).result(60)
        got = value if call == "tensor" else value[0] if call == "object" else value["t"]
        assert got.sum() == 40_000 * 40_000
        for handle in (*sends, last):
            handle.wait(60)
        a.close(30)
        b.close(30)


def test_payload_posted_ahead_without_room_is_received_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connected(inline_bytes=INLINE) as (a, b):
        for _ in range(4):
            a.isend_tensor_dict({"t": torch.ones(3000)}, 1)
            b.recv_tensor_dict(0)
        relieve = short_of(monkeypatch, 2000)
        for number in range(3):
            a.isend_tensor_dict({"t": torch.ones(3000)}, 1)
            handle = b.irecv_tensor_dict(0)
            if number == 0:  # what was posted while there was room
                assert handle.result(60)["t"].sum() == 3000
                continue
            with pytest.raises(CommError, match="no memory"):
                handle.wait(60)
        a.isend_tensor_dict({"t": torch.ones(4)}, 1)
        assert b.irecv_tensor_dict(0).result(60)["t"].sum() == 4
        relieve()
        for _ in range(3):
            a.isend_tensor_dict({"t": torch.ones(3000)}, 1)
            assert b.irecv_tensor_dict(0).result(60)["t"].sum() == 3000
        a.drain(30)
        a.close(30)
        b.close(30)


@pytest.mark.parametrize("relieved", [True, False])
def test_what_found_no_room_is_thrown_away_with_the_next_message(
    relieved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    relieve = short_of(monkeypatch, 2000)
    with connected(inline_bytes=INLINE, close_timeout=1.0) as (a, b):
        send = a.isend(torch.ones(3000), 1)
        with pytest.raises(CommError, match="no memory"):
            b.irecv(None, 0).wait(60)
        assert not send.is_completed()
        if relieved:
            relieve()
        a.isend(torch.ones(5), 1)
        assert b.irecv(None, 0).result(60).sum() == 5
        if relieved:
            send.wait(60)
            a.close(30)
        else:
            with pytest.raises(CommError, match="were not delivered"):
                a.close()
        b.close(30)
