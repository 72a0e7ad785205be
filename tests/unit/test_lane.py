"""Lanes: order, one at a time where the transport needs it, and what a bad message does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from commlayer_testkit.local import (
    SERIALIZED,
    WAITED,
    Hub,
    Work,
    connect_rank,
    connected,
    on_every_rank,
)
from frames import framed, messages, patched
from msgspec.structs import replace
from torch import Tensor

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import Order, PostMayBlock, Semantics
from commlayer.wire.control import Blame, Bye, LaneBroken, encode_control
from commlayer.wire.frame import UNSLOTTED, Kind, capacity
from commlayer.wire.tags import BROADCAST, CONTROL_LANE, OBJECTS, TagMap

INLINE = 64


def facts(of: Semantics = WAITED, **p2p: Any) -> Semantics:
    return replace(of, p2p=replace(of.p2p, **p2p))


# Order

SERIAL = {
    "UNORDERED": facts(order=Order.UNORDERED),
    "IN_ORDER_STREAM": facts(order=Order.IN_ORDER_STREAM),
    "one outstanding": facts(max_outstanding_per_pair=1),
    "post blocks": facts(post_may_block=PostMayBlock.ALWAYS),
    "polled": facts(SERIALIZED, max_outstanding_per_pair=1),
}
CONCURRENT = {"PER_TAG": WAITED, "polled": SERIALIZED}


def exchange(semantics: Semantics) -> Hub:
    hub = Hub(2, semantics)

    def body(rank: int) -> None:
        with connect_rank(hub, rank, inline_bytes=INLINE) as comm:
            peer = 1 - rank
            for i in range(20):
                comm.isend(torch.full((100 * (i % 3),), i), peer)
                comm.isend_tensor_dict({"a": torch.full((50,), i), "b": torch.full((60,), i)}, peer)
            for i in range(20):
                assert comm.recv(None, peer).tolist() == [i] * (100 * (i % 3))
            for i in range(20):
                received = comm.recv_tensor_dict(peer)
                assert (received["a"][0], received["b"][0]) == (i, i)

    on_every_rank(hub, body)
    assert hub.violations == []
    return hub


@pytest.mark.parametrize("semantics", SERIAL.values(), ids=SERIAL)
def test_a_serial_lane_keeps_order_with_one_message_outstanding(semantics: Semantics) -> None:
    assert exchange(semantics).most_outstanding == 1


@pytest.mark.parametrize("semantics", CONCURRENT.values(), ids=CONCURRENT)
def test_a_concurrent_lane_keeps_order_with_several_outstanding(semantics: Semantics) -> None:
    assert exchange(semantics).most_outstanding > 1


def test_posting_never_waits_where_native_posts_do() -> None:
    """Both ranks send first; each native post returns only when the peer receives."""
    hub = Hub(2, facts(post_may_block=PostMayBlock.ALWAYS))

    def body(rank: int) -> list[float]:
        with connect_rank(hub, rank) as comm:
            handles = [comm.isend(torch.full((4000,), float(i)), 1 - rank) for i in range(5)]
            posted.wait(30)
            received = [comm.recv(None, 1 - rank)[0].item() for _ in range(5)]
            for handle in handles:
                handle.wait(30)
            return received

    posted = threading.Barrier(2)
    assert on_every_rank(hub, body) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
    assert hub.violations == []


def test_threads_that_post_on_one_lane_mix_and_lose_nothing() -> None:
    with connected() as (a, b):

        def post(base: int) -> None:
            for i in range(50):
                a.isend_object(base + i, 1)

        threads = [threading.Thread(target=post, args=(base,)) for base in (0, 1000, 2000)]
        for thread in threads:
            thread.start()
        received = [b.recv_object(0) for _ in range(150)]
        for thread in threads:
            thread.join()
        for base in (0, 1000, 2000):
            mine = [value for value in received if base <= value < base + 1000]
            assert mine == list(range(base, base + 50))


def test_an_unclaimed_tag_does_not_hide_another() -> None:
    with connected() as (a, b):
        unclaimed = [a.isend(torch.ones(5000), 1, tag=1), a.isend(torch.ones(1), 1, tag=1)]
        other = b.channel("control").irecv(None, 0)
        seen = a.isend(torch.ones(5000), 1, tag=2)
        assert b.recv(None, 0, tag=2).sum() == 5000
        seen.wait(30)
        assert not unclaimed[0].is_completed()
        assert not other.is_completed()
        assert b.recv(None, 0, tag=1).numel() == 5000
        assert b.recv(None, 0, tag=1).numel() == 1
        a.channel("control").send(torch.ones(2), 1)
        assert other.result(30).numel() == 2


# A peer that sends what it likes: native messages from below its communicator


class Intruder:
    """Rank 1 of a hub, of which only the communicator below it can say what it sends."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.kept: list[Work] = []

    def send(
        self, message: bytes, tag: str = OBJECTS, channel: str = "data", slot: int = 0
    ) -> None:
        native = TagMap.payload(TagMap(()).native(channel, tag), slot)
        tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        self.kept.append(self.hub.post("send", 1, 0, native, tensor))


frame = partial(framed, inline_bytes=INLINE)


def first(messages: list[bytes]) -> bytes:
    return messages[0]


BAD_MESSAGES: dict[str, Callable[[], list[bytes]]] = {
    "garbage": lambda: [b"GET / HTTP/1.1\r\n\r\n".ljust(64)],
    "zeros": lambda: [bytes(64)],
    "one byte": lambda: [b"C"],
    "truncated header": lambda: [first(frame("x" * 500))[:200]],
    "header without its body": lambda: [first(frame("x" * 500))[:40]],
    "damaged body": lambda: [patched(first(frame("x" * 500)), 100, b"?")],
    "future version": lambda: [patched(first(frame(1)), 3, b"\x63")],
    "unknown kind": lambda: [patched(first(frame(1)), 4, b"\x63")],
    "unknown flag": lambda: [patched(first(frame(1)), 5, b"\x80")],
    "body of four gigabytes": lambda: [patched(first(frame(1)), 28, b"\xff" * 4)],
    "sequence gap": lambda: [first(frame(1, sequence=1))],
    "sequence in the far future": lambda: [first(frame(1, sequence=2**64 - 1))],
    "long header cut short": lambda: [frame("x" * 5000)[0], frame("x" * 5000)[1][:100]],
    "value is no value": lambda: [
        bytes(messages(Kind.OBJECT, [], b"\xc1\xc1", INLINE)[0].tolist())
    ],
    "tensor message without tensor": lambda: [first(frame(1, kind=Kind.TENSOR))],
    "a tensor nobody has": lambda: [
        bytes(messages(Kind.OBJECT, [torch.ones(2)], b"\x91\x01", INLINE)[0].tolist())
    ],
    "a million keys": lambda: frame(
        dict.fromkeys(range(1_000_000)), max_items=3_000_000, max_header_bytes=1 << 30
    ),
    "ten thousand levels": lambda: [
        bytes(m.tolist()) for m in messages(Kind.OBJECT, [], _levels(10_000), INLINE)
    ],
    "pickle": lambda: [first(frame(print, allow_pickle=True))],
}


def _levels(count: int) -> bytes:
    """``[[[...[]...]]]`` as tokens."""
    one = b"\xc7\x04\x01\x00\x00\x00\x01"
    return b"\xdd" + (count + 1).to_bytes(4, "big") + one * count + b"\xc0"


def hostile(hub: Hub, **settings: Any) -> Any:
    return connected(hub=hub, inline_bytes=INLINE, **settings)


@pytest.mark.parametrize("semantics", [WAITED, SERIALIZED], ids=["waiter", "polling"])
@pytest.mark.parametrize("bad", BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_bad_message_breaks_its_lane_and_nothing_else(
    bad: Callable[[], list[bytes]], semantics: Semantics
) -> None:
    hub = Hub(3, semantics)
    intruder = Intruder(hub)
    with hostile(hub) as (a, b, c):
        handles = [a.irecv_object(1) for _ in range(2)]
        other_lane, other_peer = a.irecv(None, 1), a.irecv_object(2)
        for index, message in enumerate(bad()):
            intruder.send(message, slot=UNSLOTTED if index else 0)
        for handle in handles:
            with pytest.raises(CommError) as caught:
                handle.wait(30)
            assert caught.value.kind is ErrorKind.PROTOCOL
            assert "rank 1" in caught.value.operation
            assert (caught.value.peer, caught.value.channel) == (1, "data")
            assert caught.value.cure
        with pytest.raises(CommError):
            a.irecv_object(1).wait(30)
        b.isend(torch.ones(3000), 0)
        c.isend_object("fine", 0)
        assert other_lane.result(30).sum() == 3000
        assert other_peer.result(30) == "fine"
        a.isend_object("still", 1)
        assert b.recv_object(0) == "still"
        assert told(b)
        a.close(10)


def test_what_memory_held_before_is_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message shorter than a header leaves the rest of the buffer as it was."""
    before = torch.frombuffer(bytearray(first(frame("from before"))), dtype=torch.uint8)
    allocate = torch.empty

    def empty(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        if tensor.dtype == torch.uint8 and tensor.numel() >= before.numel():
            tensor.view(-1)[: before.numel()] = before
        return tensor

    hub = Hub(3)
    intruder = Intruder(hub)
    monkeypatch.setattr(torch, "empty", empty)
    with hostile(hub) as (a, _, _):
        handle = a.irecv_object(1)
        intruder.send(bytes(before[:1].tolist()), slot=0)
        with pytest.raises(CommError) as caught:
            handle.result(30)
        assert caught.value.kind is ErrorKind.PROTOCOL
        a.close(10)


def told(sender: Communicator) -> bool:
    """Whether the sender learns that its lane is refused; the news is on its way."""
    failed = threading.Event()
    for _ in range(3000):
        try:
            handle = sender.isend_object("more", 0)
        except CommError as error:
            return error.kind is ErrorKind.PROTOCOL and "rank 0 refuses the lane" in error.cause
        failed.wait(0.005)
        if handle.exception() is not None:
            return "rank 0 refuses the lane" in str(handle.exception())
    return False


def test_what_arrived_before_a_bad_message_is_still_received() -> None:
    hub = Hub(2)
    intruder = Intruder(hub)
    with hostile(hub) as (a, _):
        started = a.irecv_object(1)
        for sequence in range(3):
            intruder.send(first(frame(sequence, sequence)))
        intruder.send(b"garbage".ljust(64))
        assert started.result(30) == 0
        assert [a.recv_object(1) for _ in range(2)] == [1, 2]
        with pytest.raises(CommError, match="does not begin with a commlayer header"):
            a.recv_object(1)


def test_sends_that_were_received_do_not_fail_with_the_lane() -> None:
    for _ in range(20):
        hub = Hub(2)
        intruder = Intruder(hub)
        with hostile(hub, close_timeout=0.5) as (a, b):
            receive = a.irecv(None, 1)
            send = b.isend(torch.ones(3000), 0)
            receive.wait(30)
            intruder.send(b"garbage".ljust(64), tag="0")
            with pytest.raises(CommError, match="refuses the lane"):
                b.isend(torch.ones(3000), 0).wait(30)
            send.wait(30)


def test_a_pickle_is_loaded_only_where_it_was_asked_for() -> None:
    for allowed in (False, True):
        hub = Hub(2)
        intruder = Intruder(hub)
        loaded.clear()
        with hostile(hub, allow_pickle=allowed) as (a, _):
            handle = a.irecv_object(1)
            intruder.send(first(frame(Exploit(), allow_pickle=True)))
            if allowed:
                handle.wait(30)
            else:
                with pytest.raises(CommError, match="allow_pickle is off"):
                    handle.wait(30)
        assert loaded == (["ran"] if allowed else [])


loaded: list[str] = []


def load(what: str) -> None:
    loaded.append(what)


class Exploit:
    def __reduce__(self) -> Any:
        return load, ("ran",)


def test_a_terabyte_is_refused_before_its_memory_is_asked_for() -> None:
    hub = Hub(2)
    intruder = Intruder(hub)
    with hostile(hub, max_message_bytes=1 << 20) as (a, _):
        handle = a.irecv(None, 1)
        huge = Tensor.expand(torch.empty(1), 1 << 22)
        message = messages(Kind.TENSOR, [huge.contiguous()], b"", INLINE)[0]
        intruder.send(bytes(message.tolist()), tag="0")
        with pytest.raises(CommError, match="max_message_bytes"):
            handle.wait(30)


BAD_CONTROL = {
    "garbage": b"garbage".ljust(64),
    "zeros": bytes(64),
    "no control message": bytes(messages(Kind.OBJECT, [], b"\x91\x01", 0)[0].tolist()),
    **{
        name: bytes(messages(Kind.CONTROL, [], value, 0)[0].tolist())
        for name, value in {
            "empty": b"",
            "no msgpack": b"\xc1",
            "no message": b"\x91\x01",
            "blames nobody": encode_control(Bye((), (), (), Blame(99, "gone", ""))),
            "blames at length": encode_control(Bye((), (), (), Blame(0, "x" * 1100, ""))),
            "unknown lane": encode_control(Bye((), (("nowhere", "0"),))),
            "unknown tag": encode_control(Bye(((("data", "9" * 500), 0),), ())),
            "two names for one lane": encode_control(LaneBroken(("data", "00"), 0, "")),
        }.items()
    },
}


@pytest.mark.parametrize("semantics", [WAITED, SERIALIZED], ids=["waiter", "polling"])
@pytest.mark.parametrize("message", BAD_CONTROL.values(), ids=BAD_CONTROL)
def test_a_bad_message_on_the_librarys_own_lane_loses_that_peer_only(
    message: bytes, semantics: Semantics
) -> None:
    hub = Hub(3, semantics)
    intruder = Intruder(hub)
    with hostile(hub, close_timeout=0.3) as (a, _, c):
        pending, other = a.irecv_object(1), a.irecv_object(2)
        intruder.send(message, CONTROL_LANE[1], CONTROL_LANE[0])
        with pytest.raises(CommError) as caught:
            pending.wait(30)
        assert caught.value.kind is ErrorKind.PROTOCOL
        with pytest.raises(CommError):
            a.isend_object(1, 1)
        c.isend_object("fine", 0)
        assert other.result(30) == "fine"


def test_lane_names_from_a_peer_are_checked() -> None:
    tags = TagMap(["extra"])
    for channel, tag in [("extra", "0"), ("data", "65535"), ("data", OBJECTS), ("fold", BROADCAST)]:
        assert tags.valid(channel, tag)
        assert tags.native(channel, tag) >= 0
    for channel, tag in [
        ("other", "0"), ("data", "65536"), ("data", "-1"), ("data", ""), ("data", "x"),
        ("data", "١"), ("data", "9" * 5000), ("data", "00"), ("data", "01"), ("data", "1\n"),
    ]:  # fmt: skip
        assert not tags.valid(channel, tag)


def test_native_tags_are_distinct_and_agree_whatever_the_order_of_channels() -> None:
    tags, same = TagMap(["x", "y"]), TagMap(["y", "x", "data"])
    names = [
        (channel, tag)
        for channel in tags.channels
        for tag in ("0", "1", "65535", OBJECTS, BROADCAST, CONTROL_LANE[1])
    ]
    natives = [tags.native(*name) for name in names]
    assert len(set(natives)) == len(names)
    assert natives == [same.native(*name) for name in names]
    assert max(natives) < 2**31


def test_the_largest_header_that_fits_one_message_does_and_one_more_byte_does_not() -> None:
    room = capacity(INLINE)
    sizes = {}
    for length in range(1500, 2100):
        native = messages(Kind.OBJECT, [], bytes(length), INLINE)
        assert native[0].numel() <= room
        sizes[len(native)] = max(sizes.get(len(native), 0), native[0].numel())
    assert sizes[1] == room
    assert set(sizes) == {1, 2}
