"""Which device lanes `connect` makes, and what stops the making of others."""

from __future__ import annotations

import pytest
from commlayer_testkit.sim.mount_core import connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank
from exploring import searched

from commlayer.device.opening import first_flows, first_lanes
from commlayer.errors import CommError, ErrorKind

LANES = len(first_flows(()))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("budget", [0, LANES, 2 * LANES, 16, 32, 1000])
def test_both_ends_of_a_pair_make_the_same_lanes_in_one_order(size: int, budget: int) -> None:
    plans = {rank: list(first_lanes(rank, size, ("x",), budget)) for rank in range(size)}
    for rank, plan in plans.items():
        assert len(plan) <= budget
        assert len(set(plan)) == len(plan)
        for peer in range(size):
            mine = [flow for other, flow in plan if other == peer]
            assert mine == [flow for other, flow in plans[peer] if other == rank]
    finished: set[int] = set()
    while any(plans.values()):
        ready = [
            rank
            for rank, plan in plans.items()
            if plan and plans[plan[0][0]][:1] == [(rank, plan[0][1])]
        ]
        assert ready, f"ranks wait for each other: {plans}"
        for rank in ready:
            plans[rank].pop(0)
            finished.add(rank)


def test_the_nearest_ranks_come_first() -> None:
    assert {peer for peer, _ in first_lanes(0, 8, (), 2 * LANES)} == {1, 7}
    assert {peer for peer, _ in first_lanes(0, 8, (), 4 * LANES)} == {1, 2, 6, 7}
    assert {peer for peer, _ in first_lanes(3, 4, (), 1000)} == {0, 1, 2}


def test_names_of_channels_are_taken_in_one_order() -> None:
    assert first_flows(("b", "data", "a")) == first_flows({"a": None, "b": None})


def beyond_the_budget(rank: Rank) -> None:
    comm, peer = connect_device(rank, GLOO, max_device_lanes=2), 1 - rank.index
    for tag in (1, 2):
        if rank.index == 0:
            comm.isend(rank.arena.full(tag, 8), peer, tag)
        else:
            comm.recv(None, peer, tag)
    if rank.index == 0:
        for tag in (3, 3):
            with pytest.raises(CommError, match=r"all 2 device lanes of rank 0 .*data/1") as caught:
                comm.isend(rank.arena.full(3, 8), peer, tag)
            assert caught.value.kind is ErrorKind.UNSUPPORTED
            assert "max_device_lanes" in str(caught.value)
        comm.isend(rank.arena.full(4, 8), peer, 1)
        comm.send_object("host lanes are no device lanes", peer)
    else:
        assert comm.recv(None, peer, 1).numel() == 8
        comm.recv_object(peer)
    rank.device.synchronize()
    comm.close(30)


def refused_by_the_receiver(rank: Rank) -> None:
    """Only the receiver has no lane left: both handles say so, and the next message arrives."""
    comm, peer = connect_device(rank, GLOO, max_device_lanes=2 - rank.index), 1 - rank.index
    if rank.index == 0:
        comm.isend(rank.arena.full(1, 8), peer, 1)
        refused = comm.isend(rank.arena.full(2, 8), peer, 2)
        with pytest.raises(CommError, match=r"rank 1 has none for it: all 1 device lanes"):
            refused.synchronize(100)
        comm.isend(rank.arena.full(3, 8), peer, 1)
    else:
        comm.recv(None, peer, 1)
        with pytest.raises(CommError, match=r"all 1 device lanes of rank 1"):
            comm.irecv(None, peer, 2).synchronize(100)
        comm.recv(None, peer, 1)
    rank.device.synchronize()


def refused_by_the_lower_receiver(rank: Rank) -> None:
    """The same where the rank that leads the making of lanes is the one that has none left."""
    comm, peer = connect_device(rank, GLOO, max_device_lanes=1 + rank.index), 1 - rank.index
    if rank.index == 1:
        comm.isend(rank.arena.full(1, 8), peer, 1)
        refused = comm.isend(rank.arena.full(2, 8), peer, 2)
        with pytest.raises(CommError, match=r"rank 0 has none for it: all 1 device lanes"):
            refused.synchronize(100)
        comm.isend(rank.arena.full(3, 8), peer, 1)
    else:
        comm.recv(None, peer, 1)
        with pytest.raises(CommError, match=r"all 1 device lanes of rank 0"):
            comm.irecv(None, peer, 2).synchronize(100)
        comm.recv(None, peer, 1)
    rank.device.synchronize()


@pytest.mark.parametrize(
    "body", [beyond_the_budget, refused_by_the_receiver, refused_by_the_lower_receiver]
)
@pytest.mark.parametrize("on", ["nccl", "hccl", "xccl"])
def test_beyond_the_budget_an_operation_fails_and_names_it(body: object, on: str) -> None:
    report = searched(body, on, ranks=2, budget=10)  # type: ignore[arg-type]
    assert report.failure is None, str(report)
