"""The loop and the deferred broadcast on the simulated core, under many schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from commlayer_testkit.sim import FailureKind, Rank, Report, Scenario, World, explore
from commlayer_testkit.sim.mount_core import connect

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast
from commlayer.pipeline.loop import StageLoop
from commlayer.pipeline.rows import DeferredRows, RowGenerations
from commlayer.pipeline.topology import FoldedTopology, Topology

SOURCE = 1


def explored(size: int, body: Callable[[Communicator], object], **config: Any) -> Report:
    """`body` on every rank, in schedules by chance."""

    def rank_body(rank: Rank) -> None:
        comm = connect(rank, **config)
        body(comm)
        comm.close(5)

    def setup(world: World) -> None:
        world.start(size, rank_body)

    scenario = Scenario("test", setup, None, ("gloo",))
    return explore(scenario, strategy="random", budget=40, verify_every=0, shrink=False)


def adds_chunk(topology: Topology, rank: int) -> Callable[[int, int, Any], Any]:
    def compute(batch: int, v: int, activation: Mapping[str, Any] | None) -> Any:
        trail = torch.tensor([batch]) if activation is None else activation["trail"]
        assert trail[0] == batch
        trail = torch.cat((trail, torch.tensor([topology.chunk(v, rank)])))
        return trail.tolist() if topology.last(rank, v) else {"trail": trail}

    return compute


@pytest.mark.parametrize("topology", [FoldedTopology(2), FoldedTopology(3), FoldedTopology(2, 4)])
def test_the_loop_takes_every_batch_through_every_chunk(topology: FoldedTopology) -> None:
    def body(comm: Communicator) -> None:
        loop: StageLoop[int] = StageLoop(comm, topology, adds_chunk(topology, comm.rank))
        for batch in range(3):
            loop.submit(batch)
        loop.park()
        results = [calls.result for calls in loop.finished]
        assert [calls.batch for calls in loop.finished] == [0, 1, 2]
        trails = [[batch, *range(topology.chunks)] for batch in range(3)]
        assert results == (trails if comm.rank == topology.sampling_rank else [None] * 3)

    report = explored(topology.ranks, body, channels=topology.channels)
    assert report.failure is None, str(report)


@pytest.mark.parametrize("parks", [True, False])
def test_liveness_c_needs_parking(parks: bool) -> None:
    """A rank that stops with continuations under way leaves its peer's fold sends unmatched.

    All but the first, whose receive is posted already.
    """
    topology = FoldedTopology(2)

    def body(comm: Communicator) -> None:
        loop: StageLoop[int] = StageLoop(comm, topology, adds_chunk(topology, comm.rank))
        for batch in range(2):
            loop.submit(batch)
        if comm.rank == 0:
            loop.step()
            loop.step()
            if parks:
                loop.park()
            assert comm.recv_object(1) == "next request"
        else:
            loop.park()
            comm.send_object("next request", 0)

    report = explored(2, body, inline_bytes=0)
    if parks:
        assert report.failure is None, str(report)
    else:
        assert report.failure is not None
        assert report.failure.kind is FailureKind.DEADLOCK


def test_c5_and_c9_in_every_order() -> None:
    def body(comm: Communicator) -> None:
        source = comm.rank == SOURCE
        deferred = DeferredBroadcast(comm, SOURCE)
        generations = RowGenerations(3)
        rows = DeferredRows(deferred, generations)
        table = torch.zeros(3, dtype=torch.int64)

        rows.post(0, [0, 2], torch.tensor([5, 6]) if source else None)
        generations.reuse(2)
        assert rows.write(table) == (2,)
        assert table.tolist() == [5, 0, 0]

        if source:
            rows.skip(1)
        else:
            rows.post(1, [1])
        rows_of_two = torch.tensor([7]) if source else None
        if not source:
            with pytest.raises(CommError, match="rank 1 has none: it is at step 2") as error:
                rows.write(table)
            assert error.value.kind is ErrorKind.PROTOCOL
        rows.post(2, [1], rows_of_two)
        assert rows.write(table) == ()
        assert table.tolist() == [5, 7, 0]

    report = explored(2, body)
    assert report.failure is None, str(report)
