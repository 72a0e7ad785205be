"""What drives lanes: it is there before anything leaves, and goes when there is nothing to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from commlayer_testkit.local import SERIALIZED, WAITED, Hub, connected, eventually

from commlayer import CommError, Communicator, ErrorKind
from commlayer.lanes import peer
from commlayer.semantics import Semantics

LARGE = 5000

DRIVEN = pytest.mark.parametrize(
    ("semantics", "wait_mode"),
    [(WAITED, "safe"), (WAITED, "direct")],
    ids=["waiter", "direct"],
)


@contextmanager
def no_new_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("commlayer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield


POSTS: dict[str, Callable[[Communicator], object]] = {
    "isend": lambda comm: comm.isend(torch.ones(LARGE), 1),
    "isend on a tag": lambda comm: comm.isend(torch.ones(3), 1, tag=7),
    "irecv": lambda comm: comm.irecv(None, 1),
    "irecv on a tag": lambda comm: comm.irecv(None, 1, tag=7),
    "isend_object": lambda comm: comm.isend_object([1, torch.ones(LARGE)], 1),
    "irecv_tensor_dict": lambda comm: comm.irecv_tensor_dict(1),
    "broadcast": lambda comm: comm.broadcast(torch.ones(LARGE), 0, async_op=True),
    "broadcast of another": lambda comm: comm.broadcast(None, 1, async_op=True),
}


@pytest.mark.parametrize("post", POSTS.values(), ids=POSTS)
@DRIVEN
def test_a_post_without_a_thread_has_not_happened(
    semantics: Semantics,
    wait_mode: str,
    post: Callable[[Communicator], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub = Hub(3, semantics)
    with connected(hub=hub, wait_mode=wait_mode) as (a, b, c):
        # The library's own lanes listen, each rank's to both others.
        assert eventually(lambda: hub.posted["recv"] >= 6)
        posted = hub.posted.copy()
        with no_new_thread(monkeypatch):
            for _ in range(2):
                with pytest.raises(CommError, match="no more threads") as caught:
                    post(a)
                assert caught.value.kind is ErrorKind.FULL
        assert hub.posted == posted
        assert a.ledger.snapshot().operations == ()
        assert a.ledger.snapshot().sends == a.ledger.snapshot().bytes == 0
        everything_works(a, b, c)


def everything_works(a: Communicator, b: Communicator, c: Communicator) -> None:
    """Both ways, every kind, with messages in order from the first on."""
    for tag in (0, 7):
        for i in range(3):
            for sender, receiver in ((a, b), (b, a)):
                send = sender.isend(torch.full((LARGE,), float(i)), receiver.rank, tag=tag)
                assert receiver.recv(None, sender.rank, tag=tag)[0] == i
                send.wait(30)
    for sender, receiver in ((a, b), (b, a)):
        sender.isend_object(["value"], receiver.rank)
        assert receiver.recv_object(sender.rank) == ["value"]
        sender.isend_tensor_dict({"t": torch.ones(LARGE)}, receiver.rank)
        assert receiver.recv_tensor_dict(sender.rank)["t"].sum() == LARGE
    for src in range(3):
        handles = [comm.broadcast_object(src, src, async_op=True) for comm in (a, b, c)]
        assert [handle.result(30) for handle in handles] == [src] * 3
    for comm in (a, b, c):
        comm.drain(30)


@pytest.fixture
def drivers() -> Callable[[], list[str]]:
    """The library's threads that this test has started: others may have left some."""
    there = set(threading.enumerate())
    return lambda: [
        thread.name
        for thread in threading.enumerate()
        if thread not in there and thread.name.startswith("commlayer")
    ]


def test_a_polled_transport_needs_one_thread_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        no_new_thread(monkeypatch),
        pytest.raises(CommError, match="no more threads") as caught,
        connected(2, SERIALIZED) as _,
    ):
        pass
    assert caught.value.kind is ErrorKind.FULL


@DRIVEN
def test_tags_that_are_not_used_cost_no_thread(
    semantics: Semantics, wait_mode: str, drivers: Callable[[], list[str]]
) -> None:
    tags = range(1, 101)
    with connected(2, semantics, wait_mode=wait_mode) as (a, b):
        for comm, other in ((a, b), (b, a)):
            comm.isend(torch.ones(3), other.rank)
            other.recv(None, comm.rank)
        for _ in range(2):
            for tag in tags:
                sent = [comm.isend(torch.ones(LARGE), 1 - comm.rank, tag) for comm in (a, b)]
                for comm in (a, b):
                    assert comm.recv(None, 1 - comm.rank, tag).numel() == LARGE
                for handle in sent:
                    handle.wait(30)
            # Lanes of tag 0 and the library's own keep theirs, which receive ahead.
            assert eventually(lambda: len(drivers()) <= 10), drivers()


@DRIVEN
def test_an_idle_lane_delivers_and_ends_as_any_other(
    semantics: Semantics, wait_mode: str, drivers: Callable[[], list[str]]
) -> None:
    with connected(2, semantics, wait_mode=wait_mode, close_timeout=20.0) as (a, b):
        for tag in (0, 7):
            a.isend(torch.ones(3), 1, tag)
            b.recv(None, 0, tag)
        assert eventually(lambda: not any("send to" in name for name in drivers()))
        kept = a.isend(torch.ones(3), 1, 7)
        assert b.irecv(None, 0, 7).result(30).numel() == 3
        kept.wait(30)
        assert eventually(lambda: not any("send to" in name for name in drivers()))


def test_the_number_of_lanes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "MOST_LANES", 20)
    with connected() as (a, b):
        tags = range(18)  # and perhaps the library's own, each way
        for tag in tags:
            a.isend(torch.ones(3), 1, tag)
            assert b.recv(None, 0, tag).numel() == 3
        for post in (lambda tag: a.isend(torch.ones(3), 1, tag), lambda tag: b.irecv(None, 0, tag)):
            with pytest.raises(CommError, match="20 lanes") as caught:
                _ = [post(tag) for tag in range(18, 23)]
            assert caught.value.kind is ErrorKind.FULL
        a.isend(torch.ones(3), 1, 7)
        assert b.recv(None, 0, 7).numel() == 3
        b.isend(torch.ones(3), 0, 19)
        assert a.recv(None, 1, 19).numel() == 3
