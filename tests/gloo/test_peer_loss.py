"""A peer that stops, and a peer that dies."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from ranks import here
from ranks.pool import Ranks, collect
from ranks.victim import LARGE, VICTIM, exchange, lost

from commlayer import CommError, CommTimeout, ErrorKind, Handle

HUGE = 1 << 25


def stopped_peer() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
        comm.isend(torch.ones(LARGE), 0)
        assert comm.recv(None, 0).sum() == LARGE
    elif comm.rank == 0:
        here.hear()
        receive = comm.irecv(None, VICTIM)
        send = comm.isend(torch.ones(LARGE), VICTIM)
        for handle, kind in ((receive, "irecv from"), (send, "isend to")):
            for _ in range(2):
                with pytest.raises(CommTimeout, match=f"{kind} rank 1.*not complete .* s after"):
                    handle.wait(0.2)
        with pytest.raises(CommTimeout, match="isend to rank 1"):
            comm.drain(0.2)
        exchange(comm, 2)
        here.say("timed out")
        assert receive.result(20).sum() == LARGE
        send.wait(20)
    else:
        exchange(comm, 0)
    comm.close()


def test_a_stopped_peer_times_out_and_goes_on_when_it_resumes(ranks: Ranks) -> None:
    processes = ranks.spawn(stopped_peer, 3, finalize=False)
    first, victim, _ = processes
    victim.hear()
    victim.stop()
    first.say("the peer is stopped")
    first.hear()
    victim.resume()
    victim.say("go on")
    collect(processes)


def killed_peer(state: str) -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        if state == "mid-transfer":
            target = torch.zeros(HUGE)
            comm.irecv(target, 0)
            here.say("ready")
            while target[0] == 0:
                pass
            assert target[-1] == 0, "the transfer is over already"
            os.kill(os.getpid(), signal.SIGKILL)
        here.say("ready")
        here.hear()
    elif comm.rank == 0:
        pending: list[Handle] = []
        if state == "idle":
            pending = [comm.irecv(None, VICTIM), comm.irecv_tensor_dict(VICTIM)]
        elif state == "unmatched":
            pending = [
                comm.isend(torch.ones(LARGE), VICTIM),
                comm.isend_object({"t": torch.ones(LARGE)}, VICTIM),
            ]
        here.say("posted")
        here.hear()
        if state == "mid-transfer":
            pending = [comm.isend(torch.ones(HUGE), VICTIM), comm.irecv(None, VICTIM)]
        errors = [lost(handle) for handle in pending]
        for handle in pending:
            assert handle.is_completed()
            assert str(lost(handle)) in map(str, errors)
        for call in (
            lambda: comm.isend(torch.ones(3), VICTIM),
            lambda: comm.isend_object(1, VICTIM),
            lambda: comm.irecv(None, VICTIM, tag=3),
            lambda: comm.recv_tensor_dict(VICTIM),
        ):
            with pytest.raises(CommError, match=f"rank {VICTIM}") as caught:
                call()
            assert caught.value.kind is ErrorKind.PEER_LOST
        exchange(comm, 2)
        comm.drain(20)
        snapshot = comm.ledger.snapshot()
        assert snapshot.operations == ()
        assert snapshot.sends == 0
        here.meet("exchanged", 2)
    else:
        exchange(comm, 0)
        here.meet("exchanged", 2)
    comm.close(5)


@pytest.mark.parametrize("state", ["idle", "unmatched", "mid-transfer"])
def test_a_killed_peer_is_named_and_harms_no_other(ranks: Ranks, state: str) -> None:
    processes = ranks.spawn(killed_peer, 3, state)
    first, victim, third = processes
    assert first.hear() == "posted"
    assert victim.hear() == "ready"
    if state != "mid-transfer":
        victim.signal(signal.SIGKILL)
    first.say("go on")
    assert victim.wait() == -signal.SIGKILL
    collect([first, third])
    assert [first.wait(), third.wait()] == [0, 0]


def broadcast_with_a_dead_peer() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
    elif comm.rank == 0:
        lost(comm.irecv(None, VICTIM))
        handle = comm.broadcast(torch.ones(LARGE), 0, async_op=True)
        lost(handle)
        lost(handle)
        assert handle.exception() is not None
    else:
        assert comm.broadcast(None, 0).sum() == LARGE
    if comm.rank != VICTIM:
        comm.close(5)


def test_a_broadcast_reaches_the_living(ranks: Ranks) -> None:
    processes = ranks.spawn(broadcast_with_a_dead_peer, 3)
    processes[VICTIM].hear()
    processes[VICTIM].signal(signal.SIGKILL)
    collect([processes[0], processes[2]])
    assert [processes[0].wait(), processes[2].wait()] == [0, 0]


def wait_for_the_dying() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
    errors: list[CommError] = []
    receive = comm.irecv(None, VICTIM)
    threads = [
        threading.Thread(target=lambda: errors.append(lost(receive)), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    here.say("waiting")
    for thread in threads:
        thread.join(20)
    assert len(errors) == 3
    comm.close(5)


def test_every_waiting_thread_learns_of_the_death(ranks: Ranks) -> None:
    first, victim = ranks.spawn(wait_for_the_dying, 2)
    assert victim.hear() == "ready"
    assert first.hear() == "waiting"
    victim.signal(signal.SIGKILL)
    first.result()
    assert first.wait() == 0
