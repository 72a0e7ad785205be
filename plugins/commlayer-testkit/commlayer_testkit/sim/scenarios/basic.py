"""Traffic that is right on every host transport: the ground that other scenarios stand on."""

from __future__ import annotations

from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario


def _exchange(rank: Rank, count: int) -> None:
    data, peer = rank.endpoint(), 1 - rank.index
    recvs = [blank() for _ in range(count)]
    works = [data.irecv(tensor, peer) for tensor in recvs]
    sends = [filled(10 * rank.index + n) for n in range(count)]
    works += [data.isend(tensor, peer) for tensor in sends]
    for work in works:
        work.wait()
    assert [int(t[0]) for t in recvs] == [10 * peer + n for n in range(count)]


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous")
@on_ranks(2)
def exchange_one(rank: Rank) -> None:
    """Two ranks send one message each way and wait for everything once."""
    _exchange(rank, 1)


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous")
@on_ranks(2)
def exchange_two(rank: Rank) -> None:
    """Two ranks send two messages each way; first in, first out."""
    _exchange(rank, 2)
