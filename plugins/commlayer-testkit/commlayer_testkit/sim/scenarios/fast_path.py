"""What is posted ahead, named, lingered over or driven directly, under all schedules."""

from __future__ import annotations

from commlayer_testkit.sim.rank import Rank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario
from commlayer_testkit.sim.stage import Stage

WAITED = ("gloo", "gloo_early_poll", "adversary")
"""Transports whose lanes have waiters."""


@scenario(*WAITED, "mpi", "adversary_serial")
@on_ranks(2, Stage)
def core_repeated_dicts(rank: Rank, stage: Stage) -> None:
    """One shape comes again and again, and its payload ahead of its header; then another."""
    comm = stage.connect(rank, inline_bytes=32)
    if rank.index == 0:
        for value, nbytes in enumerate((64, 64, 64, 48, 48, 64)):
            comm.isend_tensor_dict({"x": stage.source(rank, value, nbytes)}, 1)
        comm.drain()
    else:
        for value in range(6):
            assert int(comm.recv_tensor_dict(0)["x"][0]) == value
    comm.close(timeout=60.0)


@scenario("gloo", "adversary")
@on_ranks(2, Stage)
def core_repeated_dicts_unclaimed(rank: Rank, stage: Stage) -> None:
    """A rank closes with repeated payload that nobody has asked for, some of it posted ahead."""
    comm, peer = stage.connect(rank, inline_bytes=0), 1 - rank.index
    for value in range(3):
        comm.isend_tensor_dict({"x": stage.source(rank, value, 64)}, peer)
    for value in range(2):
        assert int(comm.recv_tensor_dict(peer)["x"][0]) == value
    try:
        comm.close(timeout=0.2)
    except RuntimeError:
        pass


@scenario(*WAITED, "mpi")
@on_ranks(2, Stage)
def core_two_threads_post(rank: Rank, stage: Stage) -> None:
    """Two tasks post on one lane at once; each one's messages stay in order, none is lost."""
    comm = stage.connect(rank)
    if rank.index == 1:
        values = [comm.recv_object(0) for _ in range(4)]
        assert [v for v in values if v < 10] == [0, 1], values
        assert [v for v in values if v >= 10] == [10, 11], values
        return

    def post(base: int) -> None:
        for value in range(2):
            comm.isend_object(base + value, 1)

    other = rank.spawn(lambda: post(10), "second poster")
    post(0)
    other.join()
    comm.drain()


@scenario(*WAITED)
@on_ranks(2, Stage)
def core_direct_each_way(rank: Rank, stage: Stage) -> None:
    """Both ranks send and wait directly, payload beside the header."""
    comm, peer = stage.connect(rank, wait_mode="direct", inline_bytes=32), 1 - rank.index
    for value in range(3):
        send = comm.isend_tensor_dict({"x": stage.source(rank, value, 64)}, peer)
        assert int(comm.recv_tensor_dict(peer)["x"][0]) == value
        send.wait()
    comm.close(timeout=60.0)


@scenario(*WAITED)
@on_ranks(2, Stage)
def core_direct_waiters(rank: Rank, stage: Stage) -> None:
    """Tasks wait directly for one handle and for the next of its lane; nobody is left behind."""
    comm = stage.connect(rank, wait_mode="direct")
    if rank.index == 0:
        for value in (1, 2):
            rank.sleep(1.0)
            comm.isend(stage.source(rank, value), 1)
        comm.drain()
        return
    first, second = (comm.irecv(stage.target(rank, 16), 0) for _ in range(2))
    tasks = [
        rank.spawn(lambda: second.wait(), "waits for the second"),
        rank.spawn(lambda: first.wait(), "waits for the first"),
    ]
    assert int(first.result()[0]) == 1
    for task in tasks:
        task.join()
    assert int(second.result(timeout=1.0)[0]) == 2


@scenario(*WAITED)
@on_ranks(2, Stage)
def core_direct_completes_unwaited(rank: Rank, stage: Stage) -> None:
    """Directly driven lanes move though nobody waits."""
    comm, peer = stage.connect(rank, wait_mode="direct"), 1 - rank.index
    receive = comm.irecv(stage.target(rank, 16), peer)
    send = comm.isend(filled(rank.index, 16), peer)
    rank.sleep(10.0)
    assert send.is_completed()
    assert receive.is_completed()
    assert int(receive.result()[0]) == peer
