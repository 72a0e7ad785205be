"""Whatever ends ranks, and in whatever order, exit codes are kept and none hangs."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from commlayer_testkit.ports import free_port
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, Communicator, ErrorKind

LARGE = 1 << 18


def returns(comm: Communicator) -> None:
    pass


def closes(comm: Communicator) -> None:
    comm.close()


def exits_with_7(comm: Communicator) -> None:
    sys.exit(7)


def raises(comm: Communicator) -> None:
    raise ValueError("the engine's own")


def raises_in_a_with_statement(comm: Communicator) -> None:
    with comm:
        raise ValueError("the engine's own")


def drops_the_communicator(comm: Communicator) -> None:
    del comm


ENDINGS: dict[Callable[[Communicator], None], int] = {
    returns: 0,
    closes: 0,
    exits_with_7: 7,
    raises: 1,
    raises_in_a_with_statement: 1,
    drops_the_communicator: 0,
}

each_ending = pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.__name__)


def ends(endings: list[Callable[[Communicator], None]]) -> None:
    comm = here.connect(close_timeout=5.0)
    for peer in range(comm.world_size):
        if peer != comm.rank:
            comm.irecv(None, peer)
            comm.irecv_tensor_dict(peer)
            send = comm.isend(torch.ones(LARGE), peer, tag=1)
            assert comm.recv(None, peer, tag=1).sum() == LARGE
            send.wait(20)
    here.meet("exchanged")
    here.say("ready")
    here.hear()
    endings[comm.rank](comm)


@each_ending
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["rank 0 first", "rank 1 first"])
def test_ranks_leave_one_after_another(
    ranks: Ranks, ending: Callable[[Communicator], None], order: tuple[int, int]
) -> None:
    endings = [ending, returns]
    processes = ranks.spawn(ends, 2, endings)
    for process in processes:
        process.hear()
    for rank in order:
        processes[rank].say("leave")
        assert processes[rank].wait() == ENDINGS[endings[rank]], processes[rank].output
        assert "terminate" not in processes[rank].output


@each_ending
def test_ranks_leave_together(ranks: Ranks, ending: Callable[[Communicator], None]) -> None:
    processes = ranks.spawn(ends, 3, [ending, exits_with_7, ending])
    for process in processes:
        process.hear()
    for process in processes:
        process.say("leave")
    codes = [process.wait() for process in processes]
    assert codes == [ENDINGS[ending], 7, ENDINGS[ending]], [p.output for p in processes]


def ends_with_everything_in_flight(code: int) -> None:
    comm = here.connect(close_timeout=1.0)
    peer = 1 - comm.rank
    comm.irecv(None, peer)
    comm.isend(torch.ones(LARGE), peer, tag=1)
    comm.isend_object(torch.ones(LARGE), peer)
    here.meet("posted")
    sys.exit(code)


def test_undelivered_sends_do_not_change_the_exit_code(ranks: Ranks) -> None:
    processes = ranks.spawn(ends_with_everything_in_flight, 2, 7)
    assert [process.wait() for process in processes] == [7, 7]


def ends_while_the_peer_is_stopped() -> None:
    comm = here.connect(close_timeout=1.0)
    comm.irecv(None, 1 - comm.rank)
    comm.isend(torch.ones(LARGE), 1 - comm.rank)
    here.say("ready")
    here.hear()
    sys.exit(7)


def test_a_stopped_peer_does_not_keep_a_rank_from_ending(ranks: Ranks) -> None:
    first, second = ranks.spawn(ends_while_the_peer_is_stopped, 2)
    first.hear()
    second.hear()
    second.stop()
    first.say("leave")
    assert first.wait() == 7, first.output
    second.resume()
    second.say("leave")
    assert second.wait() == 7, second.output


def test_a_killed_peer_does_not_change_the_exit_code(ranks: Ranks) -> None:
    first, second = ranks.spawn(ends_while_the_peer_is_stopped, 2)
    first.hear()
    second.hear()
    second.signal(signal.SIGKILL)
    second.wait()
    first.say("leave")
    assert first.wait() == 7, first.output


class SlowFinalization:
    """Says so and takes a second when the interpreter is being taken down."""

    def __del__(self, write: Any = os.write, sleep: Any = time.sleep) -> None:
        write(2, b"finalizing\n")
        sleep(1)


slow: SlowFinalization


def finalizes_slowly() -> None:
    global slow
    comm = here.connect(close_timeout=0.2)
    comm.irecv(None, 1 - comm.rank)
    comm.isend(torch.ones(LARGE), 1 - comm.rank)
    here.say("ready")
    here.hear()
    slow = SlowFinalization()
    sys.exit(7)


def test_a_peer_that_dies_during_finalization_does_not_abort_it(ranks: Ranks) -> None:
    first, second = ranks.spawn(finalizes_slowly, 2)
    first.hear()
    second.hear()
    second.stop()
    first.say("leave")
    first.prints("finalizing")
    second.signal(signal.SIGKILL)
    assert first.wait() == 7, first.output


def an_executor(wait: Callable[[], object]) -> None:
    ThreadPoolExecutor(1).submit(wait)


def a_thread(wait: Callable[[], object]) -> None:
    threading.Thread(target=wait).start()


def an_event_loop(wait: Callable[[], object]) -> None:
    loop = asyncio.new_event_loop()
    loop.run_until_complete(begun_in_a_loop(wait))


async def begun_in_a_loop(wait: Callable[[], object]) -> None:
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits() -> None:
        loop.call_soon_threadsafe(begun.set)
        wait()

    waiting.add(asyncio.create_task(asyncio.to_thread(waits)))
    await begun.wait()


waiting: set[asyncio.Task[None]] = set()


def leaves_a_thread_waiting(
    begin: Callable[[Callable[[], object]], None], call: str, ending: Callable[..., None]
) -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    calls: dict[str, Callable[[], object]] = {
        "recv": lambda: comm.recv(None, peer),
        "recv_object": lambda: comm.recv_object(peer),
        "broadcast": lambda: comm.broadcast_object(None, peer),
        "wait": comm.irecv_tensor_dict(peer).wait,
    }
    here.meet("posted")  # a post after the other rank has left is refused
    if comm.rank == 0:
        begin(calls[call])
        here.say("begun")
        ending(comm)
        return
    with pytest.raises(CommError) as caught:
        comm.recv_object(0)
    why = ErrorKind.PEER_LOST if ending is raises else ErrorKind.CLOSED
    assert caught.value.kind is why, "an error is told"


@pytest.mark.parametrize(
    ("begin", "call", "ending"),
    [
        (an_executor, "recv_object", exits_with_7),
        (an_executor, "broadcast", raises),
        (a_thread, "recv", raises),
        (a_thread, "wait", exits_with_7),
        (an_event_loop, "recv_object", raises),
        (an_event_loop, "wait", exits_with_7),
    ],
)
def test_a_thread_that_waits_keeps_no_process(
    ranks: Ranks,
    begin: Callable[[Callable[[], object]], None],
    call: str,
    ending: Callable[..., None],
) -> None:
    """Python joins these threads before anything that is registered with `atexit`."""
    first, second = ranks.spawn(leaves_a_thread_waiting, 2, begin, call, ending)
    assert first.hear() == "begun"
    assert first.wait() == ENDINGS[ending], first.output
    assert second.wait() == 0, second.output


def leaves_a_thread_connecting(begin: Callable[[Callable[[], object]], None]) -> None:
    if here.rank() == 1:
        here.hear()
        return
    begin(lambda: here.connect(connect_timeout=600.0))
    here.say("begun")
    time.sleep(0.5)
    sys.exit(7)


@pytest.mark.parametrize("begin", [an_executor, a_thread])
def test_a_thread_that_connects_keeps_no_process(
    ranks: Ranks, begin: Callable[[Callable[[], object]], None]
) -> None:
    first, second = ranks.spawn(leaves_a_thread_connecting, 2, begin)
    assert first.hear() == "begun"
    assert first.wait() == 7, first.output
    second.say("leave")
    assert second.wait() == 0


def is_interrupted_again() -> None:
    comm = here.connect(close_timeout=600.0)
    if comm.rank == 0:
        comm.isend(torch.ones(LARGE), 1)
        here.say("posted")
        sys.exit(7)
    here.hear()
    with pytest.raises(CommError) as caught:
        comm.recv(None, 0, tag=1)
    assert caught.value.kind is ErrorKind.CLOSED


def test_ctrl_c_ends_the_delivery_of_what_is_left_without_a_traceback(ranks: Ranks) -> None:
    first, second = ranks.spawn(is_interrupted_again, 2)
    first.hear()
    first.prints("delivering 1 sends")
    first.signal(signal.SIGINT)
    first.prints("given up (KeyboardInterrupt)")
    second.say("go on")
    assert first.wait() == 7, first.output
    assert "Traceback" not in first.output
    assert second.wait() == 0, second.output


def interrupted_while_waiting() -> None:
    comm = here.connect()
    if comm.rank == 0:
        here.say("about to wait")
        comm.recv(None, 1)
    here.hear()


def test_ctrl_c_ends_a_waiting_rank_as_it_ends_python(ranks: Ranks) -> None:
    first, second = ranks.spawn(interrupted_while_waiting, 2)
    first.hear()
    first.sleeping()
    first.signal(signal.SIGINT)
    assert first.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in first.output
    second.say("leave")
    assert second.wait() == 0


def use_in_child(comm: Communicator) -> bool:
    """Whether every call in a forked child says that the communicator is closed."""
    peer = 1 - comm.rank
    for call in (
        lambda: comm.isend(torch.ones(3), peer),
        lambda: comm.recv_object(peer),
        lambda: comm.broadcast(torch.ones(3), 0),
    ):
        with pytest.raises(CommError, match="forked") as caught:
            call()
        assert caught.value.kind is ErrorKind.CLOSED
    comm.close()
    return True


def forks(ending: str) -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    receive = comm.irecv(None, peer)
    in_flight = comm.isend(torch.ones(LARGE), peer, tag=1)
    here.meet("posted")
    child = os.fork()
    if child == 0:
        used = use_in_child(comm)
        if ending == "_exit":
            os._exit(5 if used else 1)
        sys.exit(5)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 5
    comm.isend(torch.ones(LARGE), peer)
    assert receive.result(20).sum() == LARGE
    assert comm.recv(None, peer, tag=1).sum() == LARGE
    in_flight.wait(20)
    comm.close()


@pytest.mark.parametrize("ending", ["_exit", "sys.exit"])
def test_a_forked_child_is_closed_and_its_parent_goes_on(ranks: Ranks, ending: str) -> None:
    processes = ranks.spawn(forks, 2, ending)
    assert [process.wait() for process in processes] == [0, 0], processes[0].output


def in_child_of_multiprocessing() -> None:
    sys.exit(5)


def forks_under_traffic() -> None:
    """Exchanges on one thread what it may, and forks on the other for a while."""
    comm = here.connect()
    peer, over = 1 - comm.rank, threading.Event()

    def exchanges() -> None:
        going = True
        while going:
            mine = not over.is_set()
            sent = comm.isend_object(mine, peer)
            going = comm.recv_object(peer) and mine
            sent.wait()

    thread = threading.Thread(target=exchanges)
    thread.start()
    ends = time.monotonic() + 6
    for _ in range(300):
        if time.monotonic() > ends:
            break
        child = os.fork()
        if child == 0:
            signal.alarm(15)
            comm.ledger.snapshot()
            for call in (comm.report, comm.drain):
                with pytest.raises(CommError, match="forked"):
                    call()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()


def test_children_that_are_forked_under_traffic_answer(ranks: Ranks) -> None:
    processes = ranks.spawn(forks_under_traffic, 2)
    assert [process.wait(60) for process in processes] == [0, 0], processes[0].output


def forks_by_multiprocessing() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    child = multiprocessing.get_context("fork").Process(target=in_child_of_multiprocessing)
    child.start()
    child.join(20)
    assert child.exitcode == 5
    comm.isend(torch.ones(LARGE), peer)
    assert comm.recv(None, peer).sum() == LARGE


def test_a_multiprocessing_child_ends_with_its_own_code(ranks: Ranks) -> None:
    processes = ranks.spawn(forks_by_multiprocessing, 2)
    assert [process.wait() for process in processes] == [0, 0], processes[0].output


def connects_in_multiprocessing(rank: int) -> None:
    os.environ["RANK"] = str(rank)
    comm = here.connect()
    comm.isend(torch.full((LARGE,), float(rank)), 1 - rank)
    comm.irecv(None, 1 - rank)
    sys.exit(3 + rank)


def launches_ranks_by_multiprocessing() -> None:
    os.environ["WORLD_SIZE"] = "2"
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=connects_in_multiprocessing, args=(r,)) for r in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(25)
    here.say([child.exitcode for child in children])


def test_ranks_that_are_multiprocessing_children_keep_their_codes(ranks: Ranks) -> None:
    (launcher,) = ranks.spawn(launches_ranks_by_multiprocessing, 1)
    assert launcher.hear() == [3, 4], launcher.output
    assert launcher.wait() == 0


def store_of_rank_0() -> None:
    comm = here.connect()
    comm.irecv(None, 1 - comm.rank)
    here.say("ready")
    here.hear()
    sys.exit(7)


def test_the_store_goes_with_rank_0(ranks: Ranks) -> None:
    environment = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    first, second = ranks.spawn(store_of_rank_0, 2, environment=environment)
    first.hear()
    second.hear()
    for process in (first, second):
        process.say("leave")
        assert process.wait() == 7, process.output
