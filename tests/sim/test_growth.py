"""What a message costs does not depend on how many peers there are.

Counted are the steps of the world (everything that any rank, lane or transport
does) from one round of messages to a later one, so that nothing is timed.
"""

from __future__ import annotations

import os

import pytest
from commlayer_testkit.sim import Rank, World, blank, filled, profile
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.mount_core import connect

PEERS = (1, 2, 8, 16)
LONGER = bool(os.environ.get("SIM_BUDGET"))
ROUNDS = 3


def steps_of_a_round(peers: int, on: str) -> float:
    """Steps per peer of a round in which rank 0 sends each peer a dict and gets a byte back."""
    world = World(ReplayChoices(), profile(on), max_steps=1_000_000)
    seen: list[int] = []

    def body(rank: Rank) -> None:
        comm = connect(rank)
        for turn in range(1 + ROUNDS):
            if rank.index == 0:
                seen.append(world.steps)
                others = range(1, peers + 1)
                sends = [
                    comm.isend_tensor_dict({"a": filled(turn, 16), "b": filled(peer, 16)}, peer)
                    for peer in others
                ]
                for peer in others:
                    comm.recv(blank(1), peer)
                for send in sends:
                    send.wait()
            else:
                found = comm.recv_tensor_dict(0)
                assert (int(found["a"][0]), int(found["b"][0])) == (turn, rank.index)
                comm.send(blank(1), 0)
        if rank.index == 0:
            seen.append(world.steps)

    try:
        world.start(peers + 1, body)
        world.run()
    finally:
        world.close()
    assert world.failure is None, world.failure
    return (seen[-1] - seen[1]) / (ROUNDS * peers)


@pytest.mark.parametrize("on", ["gloo", "adversary"])
def test_a_message_takes_as_many_steps_among_many_peers(on: str) -> None:
    few, *more = [steps_of_a_round(peers, on) for peers in PEERS]
    assert [steps / few for steps in more] == pytest.approx([1.0] * len(more), rel=0.1)


def test_a_transport_that_is_polled_looks_at_every_lane_once_a_round() -> None:
    one, *more = [steps_of_a_round(peers, "mpi") for peers in PEERS]
    for peers, steps in zip(PEERS[1:], more, strict=True):
        assert steps - one < 20 + 10 * peers


@pytest.mark.skipif(not LONGER, reason="SIM_BUDGET asks for the longer search")
def test_a_message_takes_as_many_steps_among_64_peers() -> None:
    assert steps_of_a_round(64, "gloo") == pytest.approx(steps_of_a_round(2, "gloo"), rel=0.1)
