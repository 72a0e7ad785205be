"""What is posted ahead, named, lingered over or driven directly, under all schedules."""

from __future__ import annotations

from commlayer.sim.rank import Rank, blank, filled
from commlayer.sim.scenario import scenario
from commlayer.sim.scenarios.core import Promises
from commlayer.sim.world import World

WAITED = ("gloo", "gloo_early_poll", "adversary")
"""Transports whose lanes have waiters."""


@scenario(*WAITED, "mpi", "adversary_serial", case="C28")
def core_repeated_dicts(world: World) -> None:
    """One shape comes again and again, and its payload ahead of its header; then another."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, inline_bytes=32)
        if rank.index == 0:
            for value, nbytes in enumerate((64, 64, 64, 48, 48, 64)):
                comm.isend_tensor_dict({"x": promises.source(value, nbytes)}, 1)
            comm.drain()
        else:
            for value in range(6):
                assert int(comm.recv_tensor_dict(0)["x"][0]) == value
        comm.close(timeout=60.0)

    world.start(2, body)


@scenario("gloo", "adversary", case="C29")
def core_repeated_dicts_unclaimed(world: World) -> None:
    """A rank closes with repeated payload that nobody has asked for, some of it posted ahead."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank, inline_bytes=0), 1 - rank.index
        for value in range(3):
            comm.isend_tensor_dict({"x": promises.source(value, 64)}, peer)
        for value in range(2):
            assert int(comm.recv_tensor_dict(peer)["x"][0]) == value
        try:
            comm.close(timeout=0.2)
        except RuntimeError:
            pass

    world.start(2, body)


@scenario(*WAITED, "mpi")
def core_two_threads_post(world: World) -> None:
    """Two tasks post on one lane at once; each one's messages stay in order, none is lost."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
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

    world.start(2, body)


@scenario(*WAITED)
def core_direct_each_way(world: World) -> None:
    """Both ranks send and wait directly, payload beside the header."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank, wait_mode="direct", inline_bytes=32), 1 - rank.index
        for value in range(3):
            send = comm.isend_tensor_dict({"x": promises.source(value, 64)}, peer)
            assert int(comm.recv_tensor_dict(peer)["x"][0]) == value
            send.wait()
        comm.close(timeout=60.0)

    world.start(2, body)


@scenario(*WAITED, case="C30")
def core_direct_waiters(world: World) -> None:
    """Tasks wait directly for one handle and for the next of its lane; nobody is left behind."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, wait_mode="direct")
        if rank.index == 0:
            for value in (1, 2):
                rank.sleep(1.0)
                comm.isend(promises.source(value), 1)
            comm.drain()
            return
        first, second = (comm.irecv(blank(16), 0) for _ in range(2))
        tasks = [
            rank.spawn(lambda: second.wait(), "waits for the second"),
            rank.spawn(lambda: first.wait(), "waits for the first"),
        ]
        assert int(first.result()[0]) == 1
        for task in tasks:
            task.join()
        assert int(second.result(timeout=1.0)[0]) == 2

    world.start(2, body)


@scenario(*WAITED, case="C16")
def core_direct_completes_unwaited(world: World) -> None:
    """Directly driven lanes move though nobody waits."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank, wait_mode="direct"), 1 - rank.index
        receive = comm.irecv(blank(16), peer)
        send = comm.isend(filled(rank.index, 16), peer)
        rank.sleep(10.0)
        assert send.is_completed()
        assert receive.is_completed()
        assert int(receive.result()[0]) == peer

    world.start(2, body)
