"""What is in flight, how much of it may be, and when it is let go."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from commlayer_testkit.local import WAITED, Hub, connect_rank, connected, on_every_rank
from msgspec.structs import replace

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.ledger import Ledger
from commlayer.progress.lifetime import Fingerprint
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.reaping import BackgroundReaping, FifoReaping
from commlayer.progress.runtime import ThreadRuntime
from commlayer.progress.waiter import WaiterProgress
from commlayer.semantics import Poll

SEND = LaneKey("data", 1, "send", "0")
OTHER = LaneKey("data", 1, "send", "1")
RECEIVE = LaneKey("data", 1, "recv", "0")


def ledger_of(
    reaping: Any = None,
    operations: int = 2,
    nbytes: int = 100,
    on_full: Any = "raise",
    timeout: float = 0.0,
) -> Ledger:
    runtime = ThreadRuntime()
    return Ledger(
        runtime,
        reaping or BackgroundReaping(),
        CommConfig(
            max_inflight_ops=operations,
            max_inflight_bytes=nbytes,
            on_full=on_full,
            full_timeout=timeout,
        ),
        WaiterProgress(runtime),
    )


def operation(lane: LaneKey = SEND, nbytes: int = 10, posted_at: float = 0.0) -> Operation:
    return Operation("isend" if lane.direction == "send" else "irecv", lane, nbytes, posted_at)


def test_counts_and_peaks() -> None:
    ledger = ledger_of()
    first, second = operation(nbytes=30), operation(nbytes=50)
    ledger.admit(first)
    ledger.admit(second)
    ledger.complete(first)
    ledger.complete(second)
    snapshot = ledger.snapshot()
    assert (snapshot.sends, snapshot.bytes) == (0, 0)
    assert (snapshot.peak_sends, snapshot.peak_bytes) == (2, 80)
    assert snapshot.operations == ()


def test_receives_are_listed_and_not_counted() -> None:
    ledger = ledger_of(operations=1, nbytes=1)
    for _ in range(5):
        ledger.admit(operation(RECEIVE))
    snapshot = ledger.snapshot()
    assert [view.direction for view in snapshot.operations] == ["recv"] * 5
    assert (snapshot.sends, snapshot.peak_bytes) == (0, 0)


@pytest.mark.parametrize(("operations", "nbytes"), [(2, 1000), (1000, 25)])
def test_the_bound_names_the_oldest(operations: int, nbytes: int) -> None:
    ledger = ledger_of(operations=operations, nbytes=nbytes)
    for age in (5.0, 3.0):
        ledger.admit(operation(posted_at=age))
    with pytest.raises(CommError) as caught:
        ledger.admit(operation())
    assert caught.value.kind is ErrorKind.FULL
    assert "2 sends and 20 bytes" in caught.value.cause
    assert "the oldest is isend to rank 1" in caught.value.cause
    assert "max_inflight_ops" in caught.value.cure
    assert ledger.snapshot().sends == 2


def test_an_empty_lane_admits_one_message_of_any_size() -> None:
    ledger = ledger_of(nbytes=10)
    ledger.admit(operation(nbytes=1000))
    ledger.admit(operation(OTHER, nbytes=1000))
    for lane in (SEND, OTHER):
        with pytest.raises(CommError, match="in flight"):
            ledger.admit(operation(lane, nbytes=1))


def test_exempt_sends_pass_the_bound() -> None:
    ledger = ledger_of(operations=1)
    for _ in range(3):
        ledger.admit(operation(), exempt=True)
    assert ledger.snapshot().sends == 3


def test_a_send_waits_for_room_and_gets_it() -> None:
    ledger = ledger_of(operations=1, on_full="wait", timeout=30.0)
    first, second = operation(), operation()
    ledger.admit(first)
    thread = threading.Thread(target=ledger.admit, args=(second,))
    thread.start()
    thread.join(0.05)
    assert ledger.snapshot().sends == 1
    ledger.complete(first)
    thread.join(30)
    assert ledger.snapshot().operations[0].state == "pending"
    assert ledger.snapshot().peak_sends == 1


def test_several_that_wait_are_all_let_in() -> None:
    ledger = ledger_of(operations=1, on_full="wait", timeout=30.0)
    done: list[Operation] = []

    def send() -> None:
        mine = operation()
        ledger.admit(mine)
        done.append(mine)
        ledger.complete(mine)

    first = operation()
    ledger.admit(first)
    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    ledger.complete(first)
    for thread in threads:
        thread.join(30)
    assert len(done) == 8
    assert ledger.snapshot().peak_sends == 1


def test_waiting_for_room_has_a_limit() -> None:
    ledger = ledger_of(operations=1, on_full="wait", timeout=0.01)
    ledger.admit(operation())
    with pytest.raises(CommError, match="the oldest is"):
        ledger.admit(operation())


def test_what_was_admitted_and_not_posted_makes_room_again() -> None:
    ledger = ledger_of(operations=1)
    first = operation()
    ledger.admit(first)
    ledger.remove(first)
    ledger.admit(operation())
    assert ledger.snapshot().sends == 1


def test_an_operation_is_settled_once() -> None:
    ledger = ledger_of()
    mine = operation(RECEIVE)
    error = CommError(ErrorKind.PEER_LOST, "irecv", "gone", "")
    ledger.admit(mine)
    assert ledger.complete(mine, 7)
    assert not ledger.fail(mine, error)
    assert not ledger.complete(mine, 8)
    assert (mine.value, mine.error) == (7, None)


def test_what_was_given_up_is_quarantined_until_the_transport_lets_go() -> None:
    ledger = ledger_of()
    mine = operation()
    ledger.admit(mine)
    ledger.fail(mine, CommError(ErrorKind.PEER_LOST, "isend", "gone", ""), quarantine=True)
    snapshot = ledger.snapshot()
    assert (snapshot.sends, snapshot.bytes, snapshot.operations) == (0, 0, ())
    assert [view.state for view in snapshot.quarantined] == ["failed"]
    assert ledger.pending_sends() == []
    ledger.complete(mine)
    assert ledger.snapshot().quarantined == ()


# Policies


def retained(ledger: Ledger, lane: LaneKey, count: int) -> list[tuple[Operation, Any]]:
    entries = []
    for _ in range(count):
        mine, source = operation(lane), torch.ones(3)
        mine.retained = [source]
        ledger.admit(mine)
        entries.append((mine, weakref.ref(source)))
        del source
    return entries


@pytest.mark.parametrize("policy", [FifoReaping, BackgroundReaping])
def test_release_is_in_order_and_stops_at_the_first_that_is_pending(policy: Any) -> None:
    ledger = ledger_of(policy(), operations=9)
    (a, ra), (b, rb), (c, rc) = retained(ledger, SEND, 3)
    ((d, rd),) = retained(ledger, OTHER, 1)
    ledger.complete(b)
    ledger.complete(d)
    ledger.reap()
    gc.collect()
    assert [r() is None for r in (ra, rb, rc, rd)] == [False, False, False, True]
    ledger.complete(a)
    ledger.reap()
    gc.collect()
    assert [r() is None for r in (ra, rb, rc)] == [True, True, False]
    assert ledger.snapshot().sends == 1
    assert not c.settled


def test_background_reaping_needs_no_call() -> None:
    background, fifo = ledger_of(BackgroundReaping()), ledger_of(FifoReaping())
    for ledger, gone in ((background, True), (fifo, False)):
        ((mine, source),) = retained(ledger, SEND, 1)
        ledger.complete(mine)
        gc.collect()
        assert (source() is None) is gone
    fifo.reap()
    gc.collect()
    assert fifo.snapshot().operations == ()


@pytest.mark.parametrize("reaping", ["fifo", "background"])
@pytest.mark.parametrize("poll", [Poll.NEVER_BEFORE_WAIT, Poll.MAY_BE_EARLY, Poll.BLOCKS])
def test_lanes_release_after_the_wait_and_never_ask_such_a_poll(reaping: str, poll: Poll) -> None:
    semantics = replace(WAITED, p2p=replace(WAITED.p2p, poll=poll))
    with connected(semantics=semantics, reaping=reaping) as (a, b):
        source = torch.arange(5000.0)
        alive = weakref.ref(source.untyped_storage())
        handle = a.isend(source, 1)
        del source
        gc.collect()
        a.ledger.reap()
        assert alive() is not None
        assert not handle.is_completed()
        assert torch.equal(b.recv(None, 0), torch.arange(5000.0))
        handle.wait(30)
        gc.collect()
        assert alive() is None
        assert a.ledger.snapshot().operations == ()


def test_idle_ranks_hold_nothing() -> None:
    with connected() as (a, b):
        b.irecv(None, 0)
        release = threading.Event()
        source = torch.ones(5000)
        weakref.finalize(source.untyped_storage(), release.set)
        a.isend(source, 1)
        del source
        assert release.wait(30)


# Over a transport, with a consumer that does not read


@pytest.mark.parametrize("limit", [{"max_inflight_ops": 3}, {"max_inflight_bytes": 60_000}])
def test_a_stalled_consumer_meets_the_bound(limit: dict[str, int]) -> None:
    with connected(on_full="raise", **limit) as (a, b):
        for i in range(3):
            a.isend(torch.full((4000,), float(i)), 1)
        with pytest.raises(CommError) as caught:
            a.isend(torch.full((4000,), 3.0), 1)
        assert caught.value.kind is ErrorKind.FULL
        received = [b.recv(None, 0)[0].item() for _ in range(3)]
        assert received == [0.0, 1.0, 2.0]
        a.drain(30)
        a.isend(torch.full((4000,), 9.0), 1)
        assert b.recv(None, 0)[0] == 9.0
        assert a.ledger.snapshot().peak_bytes <= 60_000


def test_waiting_at_the_bound_goes_on_when_the_consumer_does() -> None:
    hub = Hub(2)

    def body(rank: int) -> list[float]:
        with connect_rank(hub, rank, max_inflight_ops=2, unclaimed_messages=1) as comm:
            if rank == 0:
                for i in range(50):
                    comm.isend(torch.full((3000,), float(i)), 1)
                comm.drain(30)
                assert comm.ledger.snapshot().peak_sends <= 2
                return []
            return [comm.recv(None, 0)[0].item() for _ in range(50)]

    assert on_every_rank(hub, body)[1] == [float(i) for i in range(50)]
    assert hub.violations == []


def test_fold_traffic_passes_the_bound() -> None:
    with connected(on_full="raise", max_inflight_ops=1) as (a, b):
        a.isend(torch.ones(4000), 1)
        fold = a.channel("fold")
        for _ in range(3):
            fold.isend(torch.ones(4000), 1)
        with pytest.raises(CommError, match="in flight"):
            a.isend(torch.ones(4000), 1)
        for _ in range(3):
            b.channel("fold").recv(None, 0)
        b.recv(None, 0)


def test_unread_messages_are_bounded_at_the_receiver_and_arrive_in_order() -> None:
    with connected(unclaimed_messages=4) as (a, b):
        first = b.irecv_object(0)
        handles = [a.isend_object(i, 1) for i in range(20)]
        handles[4].wait(30)
        assert not handles[19].is_completed()
        assert first.result(30) == 0
        assert [b.recv_object(0) for _ in range(19)] == list(range(1, 20))
        a.drain(30)


def test_the_snapshot_says_what_is_in_flight() -> None:
    with connected(record_sites=True) as (a, b):
        a.isend(torch.ones(5000), 1, tag=7)
        (view,) = a.ledger.snapshot().operations
        assert (view.kind, view.channel, view.peer, view.direction, view.tag) == (
            "isend", "data", 1, "send", "7",
        )  # fmt: skip
        assert (view.sequence, view.state) == (0, "pending")
        assert view.nbytes >= 20_000
        assert view.age >= 0
        assert view.site is not None
        assert "test_ledger.py:" in view.site
        b.recv(None, 0, tag=7)


def test_an_overwrite_in_flight_names_the_posting_line() -> None:
    with connected(check_lifetime=True) as (a, b):
        source = torch.zeros(5000)
        handle = a.isend(source, 1)
        source.fill_(1)
        b.recv(None, 0)
        with pytest.raises(CommError, match=r"test_ledger\.py:\d+") as caught:
            handle.wait(30)
        assert caught.value.kind is ErrorKind.LIFETIME


def test_a_copy_may_be_overwritten_at_once() -> None:
    with connected(check_lifetime=True, retention="copy_on_post") as (a, b):
        source = torch.zeros(5000)
        handle = a.isend(source, 1)
        source.fill_(1)
        assert b.recv(None, 0).sum() == 0
        handle.wait(30)


@pytest.mark.parametrize("elements", [10, 5000, 1 << 20], ids=["inline", "large", "4 MiB"])
def test_a_copy_is_made_whatever_its_size(elements: int) -> None:
    with connected(check_lifetime=True, retention="copy_on_post") as (a, b):
        source = torch.zeros(elements)
        handles = [
            a.isend(source, 1),
            a.isend_object([source], 1),
            a.isend_tensor_dict({"x": source}, 1),
            a.broadcast(source, 0, async_op=True),
        ]
        source.fill_(1)
        assert b.recv(None, 0).sum() == 0
        assert b.recv_object(0)[0].sum() == 0
        assert b.recv_tensor_dict(0)["x"].sum() == 0
        assert b.broadcast(None, 0).sum() == 0
        for handle in handles:
            handle.wait(30)


def test_beyond_its_bound_copy_on_post_refuses() -> None:
    with connected(retention="copy_on_post", copy_max_bytes=5000 * 4 - 1) as (a, b):
        source = torch.zeros(5000)
        for call in (
            lambda: a.isend(source, 1),
            lambda: a.isend_tensor_dict({"x": source, "y": 1}, 1),
            lambda: a.broadcast(source, 0),
        ):
            with pytest.raises(CommError, match="copy_max_bytes = 19999") as caught:
                call()
            assert caught.value.kind is ErrorKind.UNSUPPORTED
            assert caught.value.peer == 1
            assert "copy_max_bytes" in caught.value.cure
        a.isend(source[1:], 1)
        source.fill_(1)
        assert b.recv(None, 0).sum() == 0


class NoMemory:
    """A retention policy whose copies find no memory."""

    name = "no_memory"
    requires: Any = {}  # noqa: RUF012

    def retain(self, tensors: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: not enough memory")


def test_a_policy_that_cannot_keep_a_source_fails_the_post_and_nothing_else() -> None:
    with connected(retention=NoMemory()) as (a, b):
        with pytest.raises(CommError, match="not enough memory") as caught:
            a.isend(torch.ones(5000), 1)
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert "no_memory" in caught.value.cause
        assert a.ledger.snapshot().operations == ()
        a.isend(torch.ones(5), 1)
        assert b.recv(None, 0).sum() == 5


@pytest.mark.parametrize("nbytes", [0, 8, 1 << 20], ids=["freed", "shrunk", "moved"])
def test_memory_that_goes_away_in_flight_counts_as_overwritten(nbytes: int) -> None:
    source = torch.ones(1000)
    taken = Fingerprint([source])
    assert not taken.changed()
    source.untyped_storage().resize_(nbytes)
    assert taken.changed()
