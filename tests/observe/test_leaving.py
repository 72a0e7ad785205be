"""Who has left and why, as the others are told: losses, errors of a rank, and what they cause."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
from commlayer_testkit.local import Hub, connected, eventually
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import Closed, CommError, CommTimeout, Communicator, OperationRef, PeerLost
from commlayer.errors import connection_with, in_a_line, peer_lost
from commlayer.pipeline.deferred import DeferredBroadcast

LARGE = 1 << 18
WORDS = "rank 1 left: ValueError: model exploded"


def leaves(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="model exploded"), comm:
        raise ValueError("model exploded\nwith a second line")


def test_a_rank_that_leaves_by_an_exception_says_so() -> None:
    with connected(3) as (a, b, c):
        receives = [a.irecv(None, 1, tag=3), a.irecv_object(1), c.broadcast(None, 1, async_op=True)]
        leaves(b)
        for receive in receives:
            with pytest.raises(PeerLost, match=WORDS) as lost:
                receive.wait(20)
            assert lost.value.peer == 1
            assert "second line" not in str(lost.value)
            assert f"pid {os.getpid()} on {socket.gethostname()}" in str(lost.value)
        first = receives[0].exception()
        assert isinstance(first, PeerLost)
        assert (first.call, first.channel, first.tag) == ("irecv", "data", "3")
        with pytest.raises(PeerLost, match=f"isend to rank 1 .*{WORDS}") as refused:
            a.isend(torch.ones(3), 1)
        assert (refused.value.call, refused.value.peer) == ("isend", 1)
        with pytest.raises(PeerLost, match=WORDS):
            a.irecv(None, 1, tag=4)
        well = c.irecv_object(0)
        a.send_object("well", 2)
        assert well.result(20) == "well"


def test_what_had_arrived_can_still_be_received() -> None:
    with connected(2) as (a, b):
        receive = a.irecv_object(1)
        b.send_object(1, 0)
        assert receive.result(20) == 1
        b.send_object(2, 0)
        leaves(b)
        assert a.irecv_object(1).result(20) == 2
        with pytest.raises(PeerLost, match=WORDS):
            a.irecv_object(1).wait(20)


def test_a_rank_that_leaves_does_not_wait_for_its_sends() -> None:
    with connected(2, close_timeout=1000.0) as (a, b):
        send = b.isend(torch.ones(LARGE), 0)
        leaves(b)
        with pytest.raises(Closed, match="rank 1 has left it: ValueError: model exploded"):
            send.wait(0)
        with pytest.raises(Closed):
            b.isend(torch.ones(3), 0)
        b.close()
        with pytest.raises(PeerLost, match=WORDS):
            a.irecv(None, 1).wait(20)


def test_abort_takes_words_and_can_be_called_again() -> None:
    with connected(2) as (a, b):
        b.abort("out of tokens")
        b.abort("again")
        with pytest.raises(PeerLost, match="rank 1 left: out of tokens"):
            a.recv_object(1)


def test_a_program_that_ends_well_inside_a_with_block_has_not_failed() -> None:
    with connected(2) as (a, b):
        with pytest.raises(SystemExit), b:
            raise SystemExit(0)
        with pytest.raises(Closed):
            a.irecv_object(1).wait(20)


@pytest.mark.parametrize("leave", [Communicator.close, leaves], ids=["close", "raise"])
def test_a_survivor_that_leaves_first_does_not_hide_the_loss(
    leave: Callable[[Communicator], None],
) -> None:
    """Rank 0 hears of rank 1's end from rank 2 alone."""
    hub = Hub(3)
    with connected(hub=hub) as (a, _, c):
        receive, other = a.irecv_object(2), c.irecv_object(1)
        error = peer_lost(1, "pid 7 on far", "its connection was cut")
        c._connection.mark_lost(1, error)
        with pytest.raises(PeerLost, match="is lost: its connection was cut"):
            other.wait(20)
        leave(c)
        words = r"irecv_object from rank 2 .*rank 1 \(pid 7 on far\) is lost: its connection was"
        with pytest.raises(PeerLost, match=words) as lost:
            receive.wait(20)
        assert lost.value.peer == 1, "the rank that is to blame"
        assert "and rank 2 closed after it" in str(lost.value)
        assert a.peers[2].state == "closed"


def test_peers_say_who_is_there_and_what_has_become_of_them() -> None:
    hub = Hub(4)
    began = time.time() - 1
    with connected(hub=hub) as (a, b, c, _):
        receive, other = a.irecv_object(3), a.irecv_object(2)
        assert {rank: view.state for rank, view in a.peers.items()} == dict.fromkeys(
            (1, 2, 3), "connected"
        )
        view = a.peers[1]
        assert (view.rank, view.host, view.pid) == (1, socket.gethostname(), os.getpid())
        assert began <= view.since <= time.time()
        assert view.reason == ""
        c.close()
        with pytest.raises(Closed):
            other.wait(20)
        leaves(b)
        hub.kill(3)
        with pytest.raises(PeerLost):
            receive.wait(20)
        assert eventually(lambda: {v.state for v in a.peers.values()} == {"left", "closed", "lost"})
        assert a.peers[1].reason.startswith(WORDS)
        assert a.peers[2].reason == "rank 2 has closed its communicator"
        assert a.peers[3].reason.startswith(f"rank 3 (pid {os.getpid()} on ")
        assert all(view.since <= each.since for each in a.peers.values())


def test_a_deferred_broadcast_names_the_peer() -> None:
    hub = Hub(2)
    with connected(hub=hub, channels=("tokens",)) as (a, _):
        deferred = DeferredBroadcast(a.channel("tokens"), 1)
        deferred.post(0)
        hub.kill(1)
        with pytest.raises(PeerLost, match="tokens of step 0 from rank 1") as lost:
            deferred.take(20)
        found = lost.value
        assert (found.peer, found.call, found.channel) == (1, "broadcast_tensor_dict", "tokens")


def test_the_transport_s_own_words_come_last() -> None:
    error = peer_lost(1, "pid 7 on far", "the transport has failed", "[x/pair.cc:5] reset")
    assert str(error) == (
        "connection with rank 1: rank 1 (pid 7 on far) is lost: the transport has failed. Rank 1 "
        "has died or cannot be reached; restart the group (the transport reports: [x/pair.cc:5] "
        "reset)"
    )


def test_an_error_that_is_about_no_peer_stays_as_it_is() -> None:
    operation = OperationRef("irecv from rank 2", "irecv", 2, "data", "0")

    class Described:
        def describe(self) -> OperationRef:
            return operation

    closed = Closed("communicator", "rank 0 has closed it", "")
    assert closed.concerning(Described()).about is None
    lost = PeerLost(connection_with(1), "rank 1 is lost: dead", "")
    concerned = lost.concerning(Described())
    assert str(concerned) == "irecv from rank 2: rank 1 is lost: dead."
    assert (concerned.peer, concerned.call, concerned.channel) == (1, "irecv", "data")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\nb"), "ValueError: a"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        ("words\x1b[31m", "words?[31m"),
        ("", "no reason given"),
    ],
)
def test_an_error_in_a_line(error: BaseException | str, line: str) -> None:
    assert in_a_line(error) == line
    assert len(in_a_line("x" * 10_000)) < 1000


# On real processes


def dies_in_the_middle() -> None:
    comm = here.connect()
    if comm.rank == 1:
        here.say("ready")
        here.hear()
    receive = comm.irecv_object(1)
    here.say("posted")
    with pytest.raises(PeerLost) as lost:
        receive.wait(20)
    error = lost.value
    here.say((error.peer, error.call, error.channel, str(error), comm.peers[1]))
    comm.close(5)


@pytest.mark.parametrize("liveness", [5.0, 0.0], ids=["liveness", "transport"])
def test_a_loss_names_the_process_whoever_notices_it(ranks: Ranks, liveness: float) -> None:
    os.environ["COMMLAYER_PEER_TIMEOUT"] = str(liveness)
    try:
        processes = ranks.spawn(dies_in_the_middle, 3)
    finally:
        del os.environ["COMMLAYER_PEER_TIMEOUT"]
    victim = processes[1]
    assert victim.hear() == "ready"
    others = [processes[0], processes[2]]
    assert [process.hear() for process in others] == ["posted"] * 2
    victim.signal(signal.SIGKILL)
    for process in others:
        peer, call, channel, text, view = process.hear()
        assert (peer, call, channel) == (1, "irecv_object", "data")
        assert text.startswith("irecv_object from rank 1 (channel data, tag objects, ")
        assert view.state == "lost"
        assert f"rank 1 (pid {view.pid} on {socket.gethostname()}) is lost: " in text
        sources = text.find(".cc:")
        assert sources < 0 or text.index("restart the group") < sources
    collect(others)


def raises_while_all_wait() -> None:
    comm = here.connect(close_timeout=30.0)
    if comm.rank == 1:
        comm.isend(torch.ones(LARGE), 0, tag=9)
        here.meet("posted", 3)
        with comm:
            raise ValueError("model exploded")
    receive = comm.irecv_object(1 if comm.rank == 0 else 0)
    here.meet("posted", 3)
    try:
        with comm:
            receive.wait(20)
    except CommTimeout:
        raise
    except CommError as error:
        here.say((error.kind.value, error.peer, str(error)))


def test_the_reason_reaches_who_waits_for_a_survivor(ranks: Ranks) -> None:
    """Rank 2 waits for rank 0, which leaves because rank 1 did."""
    processes = ranks.spawn(raises_while_all_wait, 3)
    for rank in (0, 2):
        kind, peer, text = processes[rank].hear()
        assert (kind, peer) == ("peer_lost", 1)
        assert WORDS in text
    assert "model exploded" in processes[1].output or processes[1].wait() == 1
    collect([processes[0], processes[2]])


def test_errors_and_communicators_name_a_connection_that_has_a_name() -> None:
    with connected(2, name="tp") as (a, b), connected(2) as (c, d):
        assert repr(a) == "<Communicator tp, rank 0 of 2, local, channel data, open>"
        assert repr(c) == "<Communicator rank 0 of 2, local, channel data, open>"
        receives = a.irecv_object(1), c.irecv_object(1)
        leaves(b)
        leaves(d)
        for receive, name in zip(receives, ("tp", ""), strict=True):
            with pytest.raises(PeerLost) as lost:
                receive.wait(20)
            assert lost.value.about is not None
            assert lost.value.about.connection == name
            where = "connection tp, " if name else ""
            assert str(lost.value).startswith(f"irecv_object from rank 1 ({where}channel data, ")


def test_a_waiting_thread_learns_it_too() -> None:
    with connected(2) as (a, b):
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                a.recv_object(1)
            except CommError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        leaves(b)
        thread.join(20)
        assert [type(error) for error in caught] == [PeerLost]
