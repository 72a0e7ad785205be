"""Under a stalled consumer, what is in flight stays under the bound."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, Communicator, ErrorKind

LARGE = 1 << 16
NBYTES = 4 * LARGE


def fill(comm: Communicator, count: int) -> None:
    """Post `count` large sends to rank 1; the next is refused."""
    for step in range(count):
        comm.isend(torch.full((LARGE,), float(step)), 1)
    with pytest.raises(CommError, match="isend to rank 1") as caught:
        comm.isend(torch.full((LARGE,), -1.0), 1)
    assert caught.value.kind is ErrorKind.FULL
    assert "the oldest is isend to rank 1 (channel data, tag 0, sequence" in str(caught.value)


def stalled_consumer(settings: dict[str, Any], admitted: int) -> None:
    comm = here.connect(**settings)
    if comm.rank == 0:
        for turn in range(2):
            fill(comm, admitted)
            snapshot = comm.ledger.snapshot()
            assert snapshot.sends == admitted
            assert snapshot.peak_sends <= admitted
            assert snapshot.peak_bytes <= (admitted + 1) * NBYTES
            here.meet(f"full {turn}")
            comm.drain(20)
            assert comm.ledger.snapshot().bytes == 0
    else:
        for turn in range(2):
            here.meet(f"full {turn}")
            for step in range(admitted):
                assert comm.recv(None, 0)[-1] == step
    comm.close()


@pytest.mark.parametrize("reaping", ["background", "fifo"])
@pytest.mark.parametrize(
    "on_full",
    [{"on_full": "raise"}, {"on_full": "wait", "full_timeout": 0.2}],
    ids=["raise", "wait"],
)
@pytest.mark.parametrize(
    "bound",
    [{"max_inflight_ops": 6}, {"max_inflight_bytes": 6 * NBYTES + 6 * 4096}],
    ids=["operations", "bytes"],
)
def test_full_names_the_oldest_send(
    ranks: Ranks, reaping: str, on_full: dict[str, Any], bound: dict[str, Any]
) -> None:
    ranks.run(stalled_consumer, 2, {"reaping": reaping, **on_full, **bound}, 6)


def waits_for_room(reaping: str) -> None:
    comm = here.connect(max_inflight_ops=4, reaping=reaping)
    steps = 40
    if comm.rank == 0:
        for step in range(steps):
            comm.isend(torch.full((LARGE,), float(step)), 1)
        assert comm.ledger.snapshot().peak_sends == 4
    else:
        here.say("not receiving yet")
        here.hear()
        for step in range(steps):
            assert comm.recv(None, 0)[0] == step
    comm.close()


@pytest.mark.parametrize("reaping", ["background", "fifo"])
def test_a_full_send_goes_on_once_there_is_room(ranks: Ranks, reaping: str) -> None:
    sender, receiver = ranks.spawn(waits_for_room, 2, reaping, finalize=False)
    receiver.hear()
    sender.sleeping()
    receiver.say("receive")
    sender.result()
    receiver.result()


def oversize() -> None:
    comm = here.connect(max_inflight_bytes=NBYTES // 2, on_full="raise")
    if comm.rank == 0:
        comm.isend(torch.ones(LARGE), 1)
        with pytest.raises(CommError) as caught:
            comm.isend(torch.ones(LARGE), 1)
        assert caught.value.kind is ErrorKind.FULL
        comm.isend(torch.ones(LARGE), 1, tag=1)  # another lane, and an empty one
        fold = comm.channel("fold")
        for _ in range(10):
            fold.isend(torch.ones(LARGE), 1)
        here.meet("posted")
        comm.drain(20)
    else:
        here.meet("posted")
        for tag in (0, 1):
            assert comm.recv(None, 0, tag).sum() == LARGE
        for _ in range(10):
            comm.channel("fold").recv(None, 0)
    comm.close()


def test_an_empty_lane_admits_one_oversize_send_and_fold_is_exempt(ranks: Ranks) -> None:
    ranks.run(oversize, 2)


def refused_broadcast() -> None:
    comm = here.connect(max_inflight_ops=1, on_full="raise")
    if comm.rank == 0:
        first = comm.broadcast(torch.ones(LARGE), 0, async_op=True)
        with pytest.raises(CommError) as caught:
            comm.broadcast(torch.ones(LARGE), 0, async_op=True)
        assert caught.value.kind is ErrorKind.FULL
        here.meet("refused")
        first.wait(20)
        comm.broadcast(torch.full((LARGE,), 2.0), 0)
    else:
        here.meet("refused")
        assert comm.broadcast(None, 0)[0] == 1
        assert comm.broadcast(None, 0)[0] == 2
    comm.close()


def test_a_refused_broadcast_reaches_no_rank(ranks: Ranks) -> None:
    ranks.run(refused_broadcast, 3)


def refused_send_leaves_nothing() -> None:
    comm = here.connect(max_inflight_ops=1, on_full="raise")
    if comm.rank == 0:
        comm.isend(torch.ones(LARGE), 1)
        for _ in range(5):
            with pytest.raises(CommError):
                comm.isend(torch.full((LARGE,), -1.0), 1)
        here.meet("refused")
        comm.drain(20)
        assert comm.ledger.snapshot().operations == ()
        comm.send(torch.full((LARGE,), 2.0), 1)
    else:
        here.meet("refused")
        assert comm.recv(None, 0)[0] == 1
        assert comm.recv(None, 0)[0] == 2
    comm.close()


def test_a_refused_send_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(refused_send_leaves_nothing, 2)


def dies_while_full() -> None:
    comm = here.connect(max_inflight_ops=2)
    if comm.rank == 1:
        here.say("ready")
        here.hear()
    comm.irecv(None, 1)
    here.say("filling")
    with pytest.raises(CommError, match="rank 1") as caught:
        [comm.isend(torch.ones(LARGE), 1) for _ in range(3)]
    assert caught.value.kind is ErrorKind.PEER_LOST
    assert comm.ledger.snapshot().sends == 0
    comm.close(5)


def test_a_send_that_waits_for_room_learns_that_its_peer_died(ranks: Ranks) -> None:
    first, second = ranks.spawn(dies_while_full, 2)
    second.hear()
    first.hear()
    first.sleeping()
    second.signal(signal.SIGKILL)
    first.result()
    assert first.wait() == 0
