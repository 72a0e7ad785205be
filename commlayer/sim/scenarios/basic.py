"""Traffic that is right on every host transport: the ground that other scenarios stand on."""

from __future__ import annotations

from commlayer.sim.rank import Rank, blank, filled
from commlayer.sim.scenario import scenario
from commlayer.sim.world import World


def exchange(count: int) -> object:
    """A set-up in which two ranks each send `count` messages to the other and check them."""

    def setup(world: World) -> None:
        def body(rank: Rank) -> None:
            data, peer = rank.endpoint(), 1 - rank.index
            recvs = [blank() for _ in range(count)]
            works = [data.irecv(tensor, peer) for tensor in recvs]
            sends = [filled(10 * rank.index + n) for n in range(count)]
            works += [data.isend(tensor, peer) for tensor in sends]
            for work in works:
                work.wait()
            assert [int(t[0]) for t in recvs] == [10 * peer + n for n in range(count)]

        world.start(2, body)

    return setup


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous")
def exchange_one(world: World) -> None:
    """Two ranks send one message each way and wait for everything once."""
    exchange(1)(world)  # type: ignore[operator]


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous")
def exchange_two(world: World) -> None:
    """Two ranks send two messages each way; first in, first out."""
    exchange(2)(world)  # type: ignore[operator]
