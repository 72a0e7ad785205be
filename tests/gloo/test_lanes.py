"""What waits on one lane holds up no other."""

from __future__ import annotations

import threading

import torch
from ranks import here
from ranks.pool import Ranks

LARGE = 1 << 18


def peer_is_stuck() -> None:
    comm = here.connect()
    stuck = 2
    if comm.rank == stuck:
        here.meet("the others are done")
        assert comm.recv(None, 0).sum() == LARGE
        comm.isend(torch.ones(3), 0)
    else:
        peer = 1 - comm.rank
        if comm.rank == 0:
            pending = [comm.isend(torch.ones(LARGE), stuck), comm.irecv(None, stuck)]
        for step in range(5):
            send = comm.isend(torch.full((LARGE,), float(step)), peer)
            assert comm.recv(None, peer)[0] == step
            send.wait(20)
            comm.isend_object(step, peer)
            assert comm.recv_object(peer) == step
        if comm.rank == 0:
            assert not any(handle.is_completed() for handle in pending)
        here.meet("the others are done")
        if comm.rank == 0:
            for handle in pending:
                handle.wait(20)
    comm.close()


def test_a_stuck_peer_holds_up_no_other_peer(ranks: Ranks) -> None:
    ranks.run(peer_is_stuck, 3)


def lane_is_stuck() -> None:
    comm = here.connect(channels=("mine",))
    peer = 1 - comm.rank
    lanes = [(comm, 1), (comm, 65535), (comm.channel("mine"), 1), (comm.channel("fold"), 1)]
    stuck = comm.isend(torch.ones(LARGE), peer, tag=7)
    stuck_receive = comm.irecv(None, peer, tag=8)
    for channel, tag in reversed(lanes):
        send = channel.isend(torch.full((LARGE,), float(tag)), peer, tag)
        assert channel.recv(None, peer, tag)[0] == tag
        send.wait(20)
    comm.isend_tensor_dict({"t": torch.ones(LARGE)}, peer)
    assert comm.recv_tensor_dict(peer)["t"].sum() == LARGE
    assert comm.broadcast_object("hello" if comm.rank == 0 else None, 0) == "hello"
    assert not stuck.is_completed()
    assert not stuck_receive.is_completed()
    here.meet("the other lanes went on")
    comm.isend(torch.ones(3), peer, tag=8)
    assert comm.recv(None, peer, tag=7).sum() == LARGE
    assert stuck_receive.result(20).sum() == 3
    stuck.wait(20)
    comm.close()


def test_a_stuck_tag_holds_up_no_other_tag_or_channel(ranks: Ranks) -> None:
    ranks.run(lane_is_stuck, 2)


def tags_match_in_any_order() -> None:
    comm = here.connect()
    tags = range(8)
    if comm.rank == 0:
        for step in range(3):
            for tag in tags:
                comm.isend(torch.tensor([tag, step]), 1, tag)
                comm.isend(torch.full((LARGE // 16,), float(tag)), 1, tag)
    else:
        for tag in reversed(tags):
            for step in range(3):
                assert comm.recv(None, 0, tag).tolist() == [tag, step]
                assert comm.recv(None, 0, tag)[-1] == tag
    comm.close()


def test_messages_of_one_tag_arrive_in_order_of_any_tags(ranks: Ranks) -> None:
    ranks.run(tags_match_in_any_order, 2)


def unclaimed_tag(unclaimed: int) -> None:
    comm = here.connect(unclaimed_messages=unclaimed, headers_ahead=1)
    posted = 5 * unclaimed
    if comm.rank == 0:
        ignored = [comm.isend(torch.tensor([step]), 1) for step in range(posted)]
        for step in range(posted):
            comm.send(torch.tensor([step]), 1, tag=2)
        # One was claimed, `unclaimed` are taken in, and one more header receive is posted.
        assert sum(handle.is_completed() for handle in ignored) <= unclaimed + 2
        while not ignored[unclaimed - 1].is_completed():
            threading.Event().wait(0.01)
        here.meet("tag 2 is done")
        for handle in ignored:
            handle.wait(20)
    else:
        comm.irecv(None, 0)  # one receive opens the lane
        for step in range(posted):
            assert comm.recv(None, 0, tag=2).tolist() == [step]
        here.meet("tag 2 is done")
        for step in range(1, posted):
            assert comm.recv(None, 0).tolist() == [step]
    comm.close()


def test_an_unclaimed_tag_hides_no_other_and_holds_back_its_sender(ranks: Ranks) -> None:
    ranks.run(unclaimed_tag, 2, 4)
    ranks.run(unclaimed_tag, 2, 1)
