"""Deaths that the transport does not see, and no false alarm; on processes over gloo."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from commlayer_testkit.ports import free_port
from ranks import here
from ranks.pool import Ranks, collect
from ranks.victim import LARGE, VICTIM, exchange, lost

from commlayer import CommError, CommTimeout, ErrorKind, Handle
from commlayer.liveness import sockets

HUGE = 1 << 26
SHORT = 2.0
"""Seconds: the shortest peer_timeout."""
LONGER = 3.5


def fork_a_child() -> None:
    """It lives on and holds every socket of the transport."""
    from_child, to_parent = os.pipe()
    if os.fork() == 0:
        os.write(to_parent, b"!")
        signal.pause()
    os.read(from_child, 1)


def execute_a_child() -> None:
    """As `fork_a_child`, with what survives exec."""
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)


CHILDREN: dict[str, Callable[[], None]] = {"forked": fork_a_child, "executed": execute_a_child}


def survived_by_a_child(state: str, child: str) -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        CHILDREN[child]()
        here.say("ready")
        if state == "mid-transfer":
            target = torch.zeros(HUGE)
            comm.irecv(target, 0)
            while target[0] == 0:
                pass
            assert target[-1] == 0, "the transfer is over already"
            os.kill(os.getpid(), signal.SIGKILL)
        here.hear()
    elif comm.rank == 0:
        pending: list[Handle] = [comm.irecv(None, VICTIM), comm.irecv_tensor_dict(VICTIM)]
        if state == "unmatched":
            pending += [comm.isend(torch.ones(LARGE), VICTIM, tag=1)]
            pending += [comm.isend_object({"t": torch.ones(LARGE)}, VICTIM)]
        other = comm.irecv(None, 2, tag=5)
        here.say("posted")
        here.hear()
        if state == "mid-transfer":
            pending = [comm.isend(torch.ones(HUGE), VICTIM), *pending]
        for handle in pending:
            assert str(lost(handle)) == str(lost(handle))
        for call in (
            lambda: comm.isend(torch.ones(3), VICTIM, tag=9),
            lambda: comm.isend_object(1, VICTIM),
            lambda: comm.irecv(None, VICTIM, tag=9),
            lambda: comm.recv_tensor_dict(VICTIM),
        ):
            with pytest.raises(CommError, match=f"rank {VICTIM}") as caught:
                call()
            assert caught.value.kind is ErrorKind.PEER_LOST
        assert not other.is_completed()
        exchange(comm, 2)
        here.say("exchanged")
        assert other.result(20).sum() == 3
        comm.drain(20)
        assert comm.ledger.snapshot().operations == ()
        here.meet("exchanged", 2)
        comm.close(5)
    else:
        exchange(comm, 0)
        here.hear()
        comm.isend(torch.ones(3), 0, tag=5).wait(20)
        here.meet("exchanged", 2)
        comm.close(5)


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("state", ["idle", "unmatched", "mid-transfer"])
def test_a_death_is_seen_though_a_child_holds_the_transport_open(
    ranks: Ranks, state: str, child: str
) -> None:
    processes = ranks.spawn(survived_by_a_child, 3, state, child)
    first, victim, third = processes
    assert first.hear() == "posted"
    assert victim.hear() == "ready"
    if state != "mid-transfer":
        victim.signal(signal.SIGKILL)
    first.say("go on")
    assert victim.wait() == -signal.SIGKILL, victim.output
    assert first.hear() == "exchanged"
    third.say("go on")
    collect([first, third])
    assert [first.wait(), third.wait()] == [0, 0], first.output


def broadcast_after_a_death() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        fork_a_child()
        here.say("ready")
        here.hear()
    elif comm.rank == 0:
        lost(comm.irecv(None, VICTIM))
        handle = comm.broadcast(torch.ones(LARGE), 0, async_op=True)
        lost(handle)
        comm.close(5)
    else:
        assert comm.broadcast(None, 0).sum() == LARGE
        comm.close(5)


def test_a_broadcast_counts_as_with_every_member(ranks: Ranks) -> None:
    first, victim, third = ranks.spawn(broadcast_after_a_death, 3)
    victim.hear()
    victim.signal(signal.SIGKILL)
    collect([first, third])
    assert [first.wait(), third.wait()] == [0, 0]


def last_message_before_death() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        comm.isend(torch.full((LARGE,), 7.0), 0).wait(20)
        os.kill(os.getpid(), signal.SIGKILL)
    message = comm.irecv(None, VICTIM)
    lost(comm.irecv(None, VICTIM, tag=1))
    assert message.result(20).sum() == 7 * LARGE
    comm.close(5)


def test_what_was_delivered_before_a_death_is_kept(ranks: Ranks) -> None:
    first, victim = ranks.spawn(last_message_before_death, 2)
    assert victim.wait() == -signal.SIGKILL
    first.result()
    assert first.wait() == 0, first.output


def given_up_but_alive() -> None:
    comm = here.connect()
    if comm.rank == VICTIM:
        comm.isend(torch.full((3,), 1.0), 0).wait(20)
        here.meet("sent once")
        here.meet("given up")
        comm.isend(torch.full((3,), 2.0), 0).wait(20)
        here.meet("sent again")
        here.hear()
        return
    assert comm.recv(None, VICTIM)[0] == 1
    here.meet("sent once")
    reason = CommError(ErrorKind.PEER_LOST, f"connection with rank {VICTIM}", "so they say", "")
    comm._connection.mark_lost(VICTIM, reason)
    here.meet("given up")
    here.meet("sent again")
    lost(comm.irecv(None, VICTIM))
    comm.close(5)


def test_nothing_is_received_from_a_peer_that_was_given_up(ranks: Ranks) -> None:
    first, victim = ranks.spawn(given_up_but_alive, 2)
    first.result()
    assert first.wait() == 0, first.output
    victim.say("leave")
    assert victim.wait() == 0, victim.output


def goes_on_after_silence(hogs: bool) -> None:
    comm = here.connect(peer_timeout=SHORT)
    peer = 1 - comm.rank
    if comm.rank == VICTIM:
        here.say("ready")
        if hogs:
            ctypes.PyDLL(None).usleep(int((LONGER + 1) * 1e6))  # holds the interpreter's lock
        here.hear()
        comm.isend(torch.ones(LARGE), 0)
        assert comm.recv(None, 0).sum() == LARGE
    else:
        here.hear()
        receive = comm.irecv(None, peer)
        send = comm.isend(torch.ones(LARGE), peer)
        with pytest.raises(CommTimeout):
            receive.wait(LONGER)
        here.say("no alarm")
        assert receive.result(20).sum() == LARGE
        send.wait(20)
    comm.close()


def test_a_stopped_process_is_not_lost(ranks: Ranks) -> None:
    first, victim = ranks.spawn(goes_on_after_silence, 2, False, finalize=False)
    victim.hear()
    victim.stop()
    first.say("the peer is stopped")
    assert first.hear() == "no alarm"
    victim.resume()
    victim.say("go on")
    collect([first, victim])


def test_a_process_that_hogs_its_interpreter_is_not_lost(ranks: Ranks) -> None:
    first, victim = ranks.spawn(goes_on_after_silence, 2, True, finalize=False)
    victim.hear()
    first.say("the peer is busy")
    assert first.hear() == "no alarm"
    victim.say("go on")
    collect([first, victim])


def leaves_in_order(closes: bool) -> None:
    comm = here.connect(peer_timeout=SHORT)
    if comm.rank == VICTIM:
        if closes:
            comm.close()
        return
    with pytest.raises(CommError, match=f"rank {VICTIM}") as caught:
        comm.irecv(None, VICTIM).wait(20)
    assert caught.value.kind is ErrorKind.CLOSED
    here.hear()
    other = 2 - comm.rank
    exchange(comm, other)
    with pytest.raises(CommError, match="has closed its communicator") as caught:
        comm.isend(torch.ones(3), VICTIM)
    assert caught.value.kind is ErrorKind.CLOSED
    comm.close()


@pytest.mark.parametrize("closes", [True, False], ids=["close", "exit"])
def test_a_peer_that_leaves_in_order_is_not_lost(ranks: Ranks, closes: bool) -> None:
    first, victim, third = ranks.spawn(leaves_in_order, 3, closes)
    victim.result()
    assert victim.wait() == 0
    for process in (first, third):
        process.say("it has gone")
    collect([first, third])
    assert [first.wait(), third.wait()] == [0, 0]
    assert "lost" not in first.output + third.output


def monitor_dies() -> None:
    comm = here.connect(peer_timeout=SHORT)
    if comm.rank:
        here.hear()
        return
    pending = [comm.irecv(None, 1), comm.irecv(None, 2), comm.isend(torch.ones(LARGE), 1)]

    def broken(connection: object) -> float:
        raise RuntimeError("bad luck")

    sockets.silence = broken  # type: ignore[assignment]
    for handle in pending:
        with pytest.raises(CommError, match=r"liveness monitor.*RuntimeError: bad luck"):
            handle.wait(20)
    with pytest.raises(CommError, match="liveness monitor"):
        comm.isend(torch.ones(3), 2)
    here.say("done")
    sys.exit(7)


def test_every_handle_raises_when_the_monitor_dies(ranks: Ranks) -> None:
    first, *others = ranks.spawn(monitor_dies, 3)
    assert first.hear() == "done"
    for process in others:
        process.say("leave")
    assert first.wait() == 7
    assert "the liveness monitor died" in first.output


def one_does_without() -> None:
    comm = here.connect(peer_timeout=0.0 if here.rank() == VICTIM else 5.0)
    for peer in range(comm.world_size):
        if peer != comm.rank:
            exchange(comm, peer)
    comm.close()


def test_a_rank_may_do_without(ranks: Ranks) -> None:
    ranks.run(one_does_without, 3)


def connect_often() -> None:
    def descriptors_after(times: int) -> int:
        for _ in range(times):
            here.connect().close()
        gc.collect()  # the transport lets go of its own when it is collected
        return len(os.listdir("/proc/self/fd"))

    few = descriptors_after(2)
    assert descriptors_after(50) <= few


def test_closing_releases_every_descriptor(ranks: Ranks) -> None:
    ranks.run(connect_often, 2, timeout=60)


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def child_of_a_rank() -> None:
    comm = here.connect()
    held = {each.fileno() for each in sockets._open}
    assert not any(os.get_inheritable(each) for each in held)
    child = os.fork()
    if child == 0:
        os._exit(6 if any(is_open(each) for each in held) else 5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    exchange(comm, 1 - comm.rank)
    comm.close()
    assert not [each for each in sockets._open if each.fileno() >= 0]


def test_children_of_a_rank_hold_none_of_its_connections(ranks: Ranks) -> None:
    ranks.run(child_of_a_rank, 2)


def over_ipv6(bind_address: str) -> None:
    comm = here.connect(bind_address=bind_address)
    (connection,) = (each for each in sockets._open if each.family is not socket.AF_UNIX)
    assert connection.getpeername()[0] == "::1"
    exchange(comm, 1 - comm.rank)
    comm.close()


def test_ipv6(ranks: Ranks, has_ipv6: None) -> None:
    ranks.run(over_ipv6, 2, "::1")


def test_ipv6_of_the_store(ranks: Ranks, has_ipv6: None) -> None:
    environment = {
        "MASTER_ADDR": "::1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    ranks.run(over_ipv6, 2, "", environment=environment)
