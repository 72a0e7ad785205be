"""Code that knows only ``torch.distributed``, explored unchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.mount_torch import start_distributed
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenario import scenario
from commlayer_testkit.sim.world import World


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous")
def distributed_exchange(world: World) -> None:
    """`dist.isend` and `dist.irecv` both ways, waited once."""

    def body(rank: Rank) -> None:
        peer = 1 - dist.get_rank()
        got = torch.zeros(4)
        mine = torch.full((4,), float(dist.get_rank()))
        for work in [dist.irecv(got, peer), dist.isend(mine, peer)]:
            assert work is not None
            work.wait()
        assert got.tolist() == [float(peer)] * 4

    start_distributed(world, 2, body)


@scenario("gloo", "mpi_rendezvous", expect=FailureKind.DEADLOCK)
def distributed_send_first(world: World) -> None:
    """Both ranks call the blocking `dist.send` first."""

    def body(rank: Rank) -> None:
        peer = 1 - dist.get_rank()
        with rank.naming(f"dist.send of rank {dist.get_rank()}"):
            dist.send(torch.zeros(16), peer)
        dist.recv(torch.zeros(16), peer)

    start_distributed(world, 2, body)


@scenario("gloo", expect=FailureKind.LOST_MESSAGE)
def distributed_dropped_work(world: World) -> None:
    """`dist.isend` whose work nobody keeps."""

    def body(rank: Rank) -> None:
        if dist.get_rank() == 0:
            dist.isend(torch.ones(4), 1)
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.zeros(4), 0)
            dist.recv(torch.zeros(4), 0)

    start_distributed(world, 2, body)


@scenario("gloo", "mpi_rendezvous")
def distributed_objects(world: World) -> None:
    """`send_object_list`, `broadcast_object_list`, `all_gather` and `barrier`, three ranks."""

    def body(rank: Rank) -> None:
        me = dist.get_rank()
        said = [{"step": 7}] if me == 0 else [None]
        dist.broadcast_object_list(said, src=0)
        assert said == [{"step": 7}]
        if me == 0:
            dist.send_object_list(["hello"], dst=1)
        elif me == 1:
            heard = [None]
            dist.recv_object_list(heard, src=0)
            assert heard == ["hello"]
        rows = [torch.zeros(2) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.full((2,), float(me)))
        assert [int(row[0]) for row in rows] == [0, 1, 2]
        dist.barrier()

    start_distributed(world, 3, body)
