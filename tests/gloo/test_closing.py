"""`close` delivers what it can, names what it cannot, and tells the peer."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommError, CommTimeout, ErrorKind

LARGE = 1 << 18


def lanes_left() -> list[str]:
    """Names of threads that a closed communicator has left behind."""
    return [t.name for t in threading.enumerate() if t.name.startswith("commlayer")]


def closes_while_the_peer_receives() -> None:
    comm = here.connect()
    if comm.rank == 0:
        for step in range(20):
            comm.isend(torch.full((LARGE,), float(step)), 1)
            comm.isend_object(step, 1)
        comm.close(20)
        assert comm.ledger.snapshot().operations == ()
    else:
        for step in range(20):
            assert comm.recv(None, 0)[-1] == step
            assert comm.recv_object(0) == step
        with pytest.raises(CommError, match="rank 0 has closed") as caught:
            comm.recv(None, 0)
        assert caught.value.kind is ErrorKind.CLOSED
        with pytest.raises(CommError, match="rank 0 has closed") as caught:
            comm.recv_object(0)
        assert caught.value.kind is ErrorKind.CLOSED
        comm.close()
    assert lanes_left() == []


def test_close_delivers_what_is_in_flight(ranks: Ranks) -> None:
    ranks.run(closes_while_the_peer_receives, 2)


def closes_with_undelivered_sends() -> None:
    comm = here.connect()
    if comm.rank == 0:
        handles = [comm.isend(torch.ones(LARGE), 1), comm.isend(torch.ones(LARGE), 1, tag=3)]
        with pytest.raises(CommError, match=r"2 sends were not delivered.* isend to rank 1") as end:
            comm.close(0.5)
        assert end.value.kind is ErrorKind.CLOSED
        for handle in handles:
            with pytest.raises(CommError) as caught:
                handle.wait(0)
            assert caught.value.kind is ErrorKind.CLOSED
        comm.close()
    else:
        pending = [comm.irecv(None, 0, tag=9), comm.irecv_tensor_dict(0)]
        for handle in pending:
            with pytest.raises(CommError, match="rank 0") as caught:
                handle.wait(20)
            assert caught.value.kind is ErrorKind.CLOSED
        with pytest.raises(CommError) as caught:
            comm.isend(torch.ones(3), 0)
        assert caught.value.kind is ErrorKind.CLOSED
        here.meet("told")
        comm.close()
    if comm.rank == 0:
        here.meet("told")


def test_close_names_the_undelivered_and_ends_the_peers_receives(ranks: Ranks) -> None:
    ranks.run(closes_with_undelivered_sends, 2)


def closes_with_pending_receives() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    pending = [comm.irecv(None, peer), comm.irecv_object(peer), comm.irecv(None, peer, tag=4)]
    here.meet("posted")
    comm.close(10)
    for handle in pending:
        with pytest.raises(CommError) as caught:
            handle.wait(20)
        assert caught.value.kind is ErrorKind.CLOSED
    assert lanes_left() == []


def test_pending_receives_of_both_ranks_end(ranks: Ranks) -> None:
    ranks.run(closes_with_pending_receives, 2)


def closes_behind_unclaimed_messages(sent: int) -> None:
    unclaimed = 4
    comm = here.connect(unclaimed_messages=unclaimed)
    if comm.rank == 0:
        handles = [comm.isend(torch.tensor([step]), 1) for step in range(sent)]
        for handle in handles[: 1 + unclaimed]:
            handle.wait(20)
        if sent <= 1 + unclaimed:
            comm.close(20)
        else:
            with pytest.raises(CommError, match="sends were not delivered"):
                comm.close(0.5)
        here.meet("closed")
    else:
        assert comm.recv(None, 0).item() == 0
        here.meet("closed")
        for step in range(1, 1 + unclaimed):
            assert comm.recv(None, 0).item() == step
        with pytest.raises(CommError, match="rank 0") as caught:
            comm.recv(None, 0)
        assert caught.value.kind is ErrorKind.CLOSED
        comm.close()
    assert lanes_left() == []


@pytest.mark.parametrize("sent", [5, 20])
def test_what_arrived_before_the_peer_closed_can_still_be_received(ranks: Ranks, sent: int) -> None:
    ranks.run(closes_behind_unclaimed_messages, 2, sent)


def peer_is_stopped() -> None:
    comm = here.connect()
    if comm.rank == 1:
        here.say("ready")
        here.hear()
        comm.close()
        return
    here.hear()
    with pytest.raises(CommTimeout, match=r"no answer within 0\.5 s from rank 1"):
        comm.close(0.5)
    comm.close(0.5)


def test_close_names_a_peer_that_does_not_answer(ranks: Ranks) -> None:
    processes = ranks.spawn(peer_is_stopped, 2)
    processes[1].hear()
    processes[1].stop()
    processes[0].say("close")
    processes[0].result()
    assert processes[0].wait() == 0
    processes[1].resume()
    processes[1].say("close")
    collect(processes[1:])
    assert processes[1].wait() == 0


def leaves_at_once(ending: str, elements: int) -> list[float] | None:
    comm = here.connect()
    if comm.rank == 0:
        for step in range(10):
            comm.isend(torch.full((elements,), float(step)), 1)
            comm.isend_tensor_dict({"t": torch.full((elements,), float(step))}, 1)
        if ending == "close":
            comm.close()
        return None
    here.hear()
    received = []
    for _ in range(10):
        received += [comm.recv(None, 0)[-1].item(), comm.recv_tensor_dict(0)["t"][-1].item()]
    comm.close()
    return received


@pytest.mark.parametrize("elements", [16, LARGE], ids=["inline", "large"])
@pytest.mark.parametrize("ending", ["close", "exit"])
def test_what_a_rank_sent_before_it_left_arrives(ranks: Ranks, ending: str, elements: int) -> None:
    sender, receiver = ranks.spawn(leaves_at_once, 2, ending, elements)
    if ending == "exit":
        sender.result()
        assert not sender.ends(within=0.5)
    receiver.say("receive now")
    assert receiver.result() == [step for step in range(10) for _ in range(2)]
    assert [sender.wait(), receiver.wait()] == [0, 0]


def reconnects() -> None:
    for turn in range(3):
        comm = here.connect()
        send = comm.isend(torch.tensor([turn]), 1 - comm.rank)
        assert comm.recv(None, 1 - comm.rank).item() == turn
        send.wait(20)
        comm.close()


def test_connect_again_after_close(ranks: Ranks) -> None:
    ranks.run(reconnects, 2)


def context_manager() -> None:
    with here.connect() as comm:
        comm.isend(torch.ones(LARGE), 1 - comm.rank)
        assert comm.recv(None, 1 - comm.rank).sum() == LARGE
    assert comm.ledger.snapshot().operations == ()
    comm = here.connect()
    with pytest.raises(ValueError, match="the engine's own"), comm:
        raise ValueError("the engine's own")
    with pytest.raises(CommError):
        comm.isend(torch.ones(3), 1 - comm.rank)


def test_a_with_statement_closes(ranks: Ranks) -> None:
    ranks.run(context_manager, 2)


def closes_under_waiting_threads() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    handle = comm.irecv(None, peer)
    outcomes: list[ErrorKind] = []

    def wait() -> None:
        with pytest.raises(CommError) as caught:
            handle.wait(20)
        outcomes.append(caught.value.kind)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    closing = [threading.Thread(target=comm.close, args=(10,)) for _ in range(3)]
    for thread in waiting:
        thread.start()
    here.meet("waiting")
    for thread in closing:
        thread.start()
    for thread in waiting + closing:
        thread.join(20)
        assert not thread.is_alive()
    assert outcomes == [ErrorKind.CLOSED] * 3
    assert lanes_left() == []


def test_close_from_several_threads_ends_waits_of_others(ranks: Ranks) -> None:
    ranks.run(closes_under_waiting_threads, 2)


def peer_dies_while_closing() -> None:
    comm = here.connect()
    if comm.rank == 1:
        here.say("ready")
        here.hear()
    here.hear()
    send = comm.isend(torch.ones(LARGE), 1)
    here.say("closing")
    comm.close(25)
    with pytest.raises(CommError) as caught:
        send.wait(0)
    assert caught.value.kind is ErrorKind.PEER_LOST


def test_a_peer_that_dies_ends_a_close(ranks: Ranks) -> None:
    first, second = ranks.spawn(peer_dies_while_closing, 2)
    second.hear()
    second.stop()
    first.say("close")
    first.hear()
    first.sleeping()
    second.signal(signal.SIGKILL)
    first.result(20)
    assert first.wait() == 0


def interrupted_close() -> None:
    comm = here.connect()
    if comm.rank == 1:
        here.say("ready")
        here.hear()
        assert comm.recv(None, 0).sum() == LARGE
        return
    here.hear()
    comm.isend(torch.ones(LARGE), 1)
    here.say("closing")
    with pytest.raises(KeyboardInterrupt):
        comm.close(1000)
    here.say("interrupted")
    comm.close()
    assert comm.ledger.snapshot().sends == 0


def test_ctrl_c_interrupts_a_close_and_the_next_one_goes_on(ranks: Ranks) -> None:
    first, second = ranks.spawn(interrupted_close, 2)
    second.hear()
    first.say("close")
    first.hear()
    first.sleeping()
    first.signal(signal.SIGINT)
    assert first.hear(10) == "interrupted"
    second.say("receive")
    second.result()
    assert [first.wait(), second.wait()] == [0, 0], first.output


def invalid_limits() -> None:
    comm = here.connect()
    for call in (comm.close, comm.drain):
        for bad in (-1, float("nan")):
            with pytest.raises(ValueError, match="timeout"):
                call(bad)
    comm.isend_object("still open", 1 - comm.rank)
    assert comm.recv_object(1 - comm.rank) == "still open"
    comm.close()


def test_invalid_limits_close_nothing(ranks: Ranks) -> None:
    ranks.run(invalid_limits, 2)
