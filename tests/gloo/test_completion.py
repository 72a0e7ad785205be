"""Sends never block, complete on their own, and release what they held."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks

from commlayer import Communicator

POLICIES: dict[str, dict[str, Any]] = {
    "background": {},
    "fifo": {"reaping": "fifo"},
    "copy_on_post": {"retention": "copy_on_post"},
}
INLINE, LARGE = 16, 1 << 18
"""Numbers of elements that travel inside the header message, and that do not."""

each_policy = pytest.mark.parametrize("policy", POLICIES)
each_size = pytest.mark.parametrize("elements", [INLINE, LARGE], ids=["inline", "large"])


def settle(comm: Communicator) -> None:
    """Wait until the ledger is empty, without a call that waits for an operation."""
    pause = threading.Event()
    for _ in range(1000):
        if not comm.ledger.snapshot().operations:
            return
        pause.wait(0.01)
    raise AssertionError(f"still in the ledger: {comm.ledger.snapshot().operations}")


def both_post_first(policy: str, elements: int) -> None:
    comm = here.connect(**POLICIES[policy])
    peer = 1 - comm.rank
    tensor = torch.full((elements,), float(comm.rank))
    sends = []
    for step in range(3):
        sends.append(comm.isend(tensor + step, peer))
        sends.append(comm.isend_object({"step": step, "t": tensor + step}, peer))
        sends.append(comm.isend_tensor_dict({"t": tensor, "step": step, "u": tensor + 1}, peer))
    here.meet("all sends are posted, no receive is")
    target = torch.empty(elements)
    for step in range(3):
        assert comm.recv(target, peer) is target
        assert torch.equal(target, torch.full((elements,), float(peer + step)))
        obj = comm.recv_object(peer)
        assert obj["step"] == step
        assert torch.equal(obj["t"], target)
        tensors = comm.recv_tensor_dict(peer)
        assert list(tensors) == ["t", "step", "u"]
        assert tensors["step"] == step
        assert torch.equal(tensors["u"], torch.full((elements,), float(peer + 1)))
    for send in sends:
        send.wait(20)
    comm.close()


@each_policy
@each_size
def test_both_ranks_post_sends_first(ranks: Ranks, policy: str, elements: int) -> None:
    ranks.run(both_post_first, 2, policy, elements)


def completes_on_its_own(elements: int) -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    tensor = torch.ones(elements)
    receive = comm.irecv(None, peer)
    receive_dict = comm.irecv_tensor_dict(peer)
    assert not receive.is_completed()
    here.meet("receives are posted")
    handles = [receive, receive_dict, comm.isend(tensor, peer)]
    handles.append(comm.isend_tensor_dict({"t": tensor}, peer))
    pause = threading.Event()
    for handle in handles:
        while not handle.is_completed():
            pause.wait(0.01)
        assert handle.exception() is None
    assert torch.equal(receive.result(0), tensor)
    assert torch.equal(receive_dict.result(0)["t"], tensor)
    comm.close()


@each_size
def test_is_completed_turns_true_without_a_wait(ranks: Ranks, elements: int) -> None:
    ranks.run(completes_on_its_own, 2, elements)


def send_is_not_complete_early() -> None:
    comm = here.connect()
    if comm.rank == 0:
        send = comm.isend(torch.ones(LARGE), 1)
        here.meet("sent, not received")
        assert not send.is_completed()
        here.meet("looked")
        send.wait(20)
        assert send.is_completed()
    else:
        here.meet("sent, not received")
        here.meet("looked")
        comm.recv(None, 0)
    comm.close()


def test_a_large_send_is_not_complete_before_the_peer_receives(ranks: Ranks) -> None:
    ranks.run(send_is_not_complete_early, 2)


def reaps_when_idle(elements: int) -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    for _ in range(5):
        comm.isend(torch.ones(elements), peer)
        comm.isend_object([torch.ones(elements)], peer)
        comm.irecv(None, peer)
        comm.irecv_object(peer)
    settle(comm)
    snapshot = comm.ledger.snapshot()
    assert (snapshot.sends, snapshot.bytes, snapshot.quarantined) == (0, 0, ())
    assert snapshot.peak_sends > 0
    comm.close()


@each_size
def test_the_ledger_empties_when_nobody_calls(ranks: Ranks, elements: int) -> None:
    ranks.run(reaps_when_idle, 2, elements)


def synchronous_calls_leave_nothing(policy: str) -> None:
    comm = here.connect(**POLICIES[policy])
    for elements in (INLINE, LARGE):
        tensor = torch.ones(elements)
        if comm.rank == 0:
            comm.send(tensor, 1)
            comm.send_object({"t": tensor}, 1)
            comm.send_tensor_dict({"t": tensor}, 1)
        else:
            comm.recv(tensor, 0)
            comm.recv_object(0)
            comm.recv_tensor_dict(0)
        assert comm.ledger.snapshot().operations == ()
        comm.broadcast(tensor, 0)
        comm.broadcast_object({"t": tensor}, 1)
        assert comm.ledger.snapshot().operations == ()
    comm.close()


@each_policy
def test_synchronous_calls_leave_the_ledger_empty(ranks: Ranks, policy: str) -> None:
    ranks.run(synchronous_calls_leave_nothing, 2, policy)


def every_policy_reaps(policy: str) -> None:
    comm = here.connect(max_inflight_ops=8, **POLICIES[policy])
    peer = 1 - comm.rank
    for step in range(64):
        comm.isend(torch.full((LARGE // 8,), float(step)), peer)
        received = comm.recv(None, peer)
        assert received[0] == step
    comm.drain(20)
    assert comm.ledger.snapshot().operations == ()
    assert comm.ledger.snapshot().peak_sends <= 8
    comm.close()


@each_policy
def test_released_sends_make_room_below_the_bound(ranks: Ranks, policy: str) -> None:
    ranks.run(every_policy_reaps, 2, policy)


def posts_from_threads() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    failures: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            for step in range(20):
                elements = LARGE // 16 if step % 2 else INLINE
                send = comm.isend(torch.full((elements,), float(step)), peer, tag)
                assert comm.recv(None, peer, tag)[-1] == step
                send.wait(20)
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(25)
        assert not thread.is_alive()
    assert failures == []
    comm.close()


def test_threads_post_on_lanes_of_their_own(ranks: Ranks) -> None:
    ranks.run(posts_from_threads, 2)
