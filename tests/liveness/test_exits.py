"""Signals, errors and losses end a rank with its own code, and no other rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import pytest
import torch
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommError, ErrorKind, PeerLost

LARGE = 1 << 18
HUGE = 1 << 26
VICTIM = 1


def ended_by_sigterm(handled: bool) -> None:
    comm = here.connect(close_timeout=5.0)
    if comm.rank == VICTIM:

        def leave(number: int, frame: FrameType | None) -> None:
            sys.exit(3)

        if handled:
            signal.signal(signal.SIGTERM, leave)
        here.say("waiting")
        comm.recv(None, 0)
    others = [peer for peer in range(3) if peer not in (comm.rank, VICTIM)]
    pending = comm.irecv(None, VICTIM)
    here.say("pending")
    with pytest.raises(CommError, match=f"rank {VICTIM}") as caught:
        pending.wait(20)
    assert caught.value.kind is (ErrorKind.CLOSED if handled else ErrorKind.PEER_LOST)
    for peer in others:
        send = comm.isend(torch.ones(LARGE), peer)
        assert comm.recv(None, peer).sum() == LARGE
        send.wait(20)
    here.meet("exchanged", 2)
    sys.exit(7)


@pytest.mark.parametrize("handled", [True, False], ids=["handler exits", "default"])
def test_sigterm_in_one_rank(ranks: Ranks, handled: bool) -> None:
    processes = ranks.spawn(ended_by_sigterm, 3, handled)
    victim = processes[VICTIM]
    for process in processes:
        process.hear()
    victim.sleeping()
    victim.signal(signal.SIGTERM)
    codes = [process.wait() for process in processes]
    assert codes == [7, 3 if handled else -signal.SIGTERM, 7], [p.output for p in processes]


def waits_for_both() -> None:
    comm = here.connect()
    comm.irecv(None, 1 - comm.rank)
    comm.isend(torch.ones(LARGE), 1 - comm.rank)
    here.say("pending")
    comm.recv(None, 1 - comm.rank, tag=1)


def test_sigterm_in_every_rank(ranks: Ranks) -> None:
    """As a launcher ends a job."""
    processes = ranks.spawn(waits_for_both, 2)
    for process in processes:
        process.hear()
    for process in processes:
        process.signal(signal.SIGTERM)
    assert [process.wait() for process in processes] == [-signal.SIGTERM] * 2


def uncaught_loss() -> None:
    comm = here.connect(close_timeout=2.0)
    if comm.rank == VICTIM:
        if os.fork() == 0:
            signal.pause()
        target = torch.zeros(HUGE)
        comm.irecv(target, 0)
        while target[0] == 0:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    handle = comm.isend(torch.ones(HUGE), VICTIM)
    with pytest.raises(CommError):
        handle.wait(20)
    stuck = comm.ledger.snapshot()
    assert stuck.sends == 0
    assert any(each.nbytes >= 4 * HUGE for each in stuck.quarantined)
    here.say("quarantined")
    handle.wait()


def test_a_loss_that_nobody_catches_ends_the_rank_with_1(ranks: Ranks) -> None:
    """A send is stuck inside the transport for good: a child of the dead peer holds it open."""
    first, victim = ranks.spawn(uncaught_loss, 2)
    assert first.hear() == "quarantined"
    assert first.wait() == 1, first.output
    assert victim.wait() == -signal.SIGKILL
    assert f"rank {VICTIM}" in first.output
    assert "terminate" not in first.output


def raises_beside_others() -> None:
    comm = here.connect(close_timeout=5.0)
    if comm.rank == VICTIM:
        comm.isend(torch.ones(LARGE), 0)
        comm.isend(torch.ones(LARGE), 2)
        raise ValueError("the engine's own")
    other = 2 - comm.rank
    assert comm.recv(None, VICTIM).sum() == LARGE
    with pytest.raises(PeerLost, match=f"rank {VICTIM} left: ValueError: the engine's own") as lost:
        comm.recv(None, VICTIM)
    assert (lost.value.peer, lost.value.call, lost.value.channel) == (VICTIM, "irecv", "data")
    send = comm.isend(torch.ones(LARGE), other)
    assert comm.recv(None, other).sum() == LARGE
    send.wait(20)
    comm.close()


def test_an_exception_in_one_rank_delivers_and_harms_no_other(ranks: Ranks) -> None:
    first, victim, third = ranks.spawn(raises_beside_others, 3)
    collect([first, third])
    assert [first.wait(), victim.wait(), third.wait()] == [0, 1, 0], victim.output


def closes_twice() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    comm.isend(torch.ones(LARGE), peer)
    assert comm.recv(None, peer).sum() == LARGE
    here.meet("exchanged")
    closing = [threading.Thread(target=comm.close) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)
    comm.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("commlayer")]


def test_a_double_close_is_one(ranks: Ranks) -> None:
    ranks.run(closes_twice, 2)


def closes_with_undelivered_sends() -> None:
    comm = here.connect()
    if comm.rank == 0:
        comm.isend(torch.ones(LARGE), VICTIM)
        here.say("posted")
        with pytest.raises(CommError, match=f"1 sends.*isend to rank {VICTIM}") as caught:
            comm.close(1.0)
        assert caught.value.kind is ErrorKind.CLOSED
        here.say("closed")
        here.hear()
    else:
        here.hear()


def test_close_names_what_is_undelivered_and_returns(ranks: Ranks) -> None:
    first, second = ranks.spawn(closes_with_undelivered_sends, 2)
    first.hear()
    second.sleeping()
    second.stop()
    assert first.hear() == "closed"
    second.resume()
    for process in (first, second):
        process.say("leave")
    assert [first.wait(), second.wait()] == [0, 0], first.output
