"""The stage loop on real processes: the same result as in one, with several batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks
from torch import Tensor

from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast
from commlayer.pipeline.loop import BatchCalls, RankStages, StageLoop
from commlayer.pipeline.topology import FoldedTopology, LinearTopology, Topology

ROWS, HIDDEN, VOCABULARY, LAYERS = 3, 16, 50, 8
BATCHES, STEPS = 3, 4


@dataclass
class Batch:
    """Requests that travel together: one token a row and step."""

    number: int
    step: int = 0
    tokens: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int64))


class Model:
    """Layers with a state of their own for each batch, so that order and mixing up show."""

    def __init__(self) -> None:
        maker = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=maker)
        self.weights = torch.randn(LAYERS, HIDDEN, HIDDEN, generator=maker) / HIDDEN**0.5
        self.states = torch.zeros(LAYERS, BATCHES, ROWS, HIDDEN)

    def layer(self, index: int, batch: int, hidden: Tensor) -> Tensor:
        state = self.states[index, batch]
        state.mul_(0.5).add_(hidden)
        return torch.tanh(state @ self.weights[index]) + hidden

    def sample(self, hidden: Tensor) -> Tensor:
        return (hidden @ self.embedding.T).argmax(-1)


def alone() -> list[list[list[int]]]:
    """The tokens of every batch and step, computed in one process."""
    model = Model()
    results = []
    for number in range(BATCHES):
        batch = Batch(number, tokens=torch.full((ROWS,), number))
        tokens = []
        for _ in range(STEPS):
            hidden = model.embedding[batch.tokens]
            for index in range(LAYERS):
                hidden = model.layer(index, number, hidden)
            batch.tokens = model.sample(hidden)
            tokens.append(batch.tokens.tolist())
        results.append(tokens)
    return results


def compute_of(
    model: Model, topology: Topology, rank: int
) -> Callable[[Batch, int, Mapping[str, Any] | None], Any]:
    ranges = topology.layers(LAYERS)

    def compute(batch: Batch, v: int, activation: Mapping[str, Any] | None) -> Any:
        if activation is None:
            hidden = model.embedding[batch.tokens]
        else:
            assert activation["batch"] == batch.number
            hidden = activation["hidden"]
        for index in ranges[topology.chunk(v, rank)]:
            hidden = model.layer(index, batch.number, hidden)
        if topology.last(rank, v):
            return model.sample(hidden)
        return {"batch": batch.number, "hidden": hidden}

    return compute


def generate(topology: Topology) -> list[list[list[int]]]:
    """Every batch's tokens; a batch's next step is submitted when its tokens are known."""
    comm = here.connect(channels=topology.channels)
    loop: StageLoop[Batch] = StageLoop(comm, topology, compute_of(Model(), topology, comm.rank))
    shared = [
        DeferredBroadcast(comm, topology.sampling_rank, f"tokens of batch {number}")
        for number in range(BATCHES)
    ]
    tokens: list[list[list[int]]] = [[] for _ in range(BATCHES)]
    most = 0

    def end_step(ended: BatchCalls[Batch]) -> None:
        shared[ended.batch.number].post(ended.batch.step, ended.result)

    batches = [Batch(number, tokens=torch.full((ROWS,), number)) for number in range(BATCHES)]
    for batch in batches:
        loop.submit(batch)
    for _ in range(STEPS - 1):
        for batch in batches:
            while shared[batch.number].pending is None:
                most = max(most, loop.pending)
                loop.step(20)
                while loop.finished:
                    end_step(loop.finished.popleft())
            batch.tokens = shared[batch.number].take(20)
            tokens[batch.number].append(batch.tokens.tolist())
            batch.step += 1
            loop.submit(batch)
    loop.park(20)
    assert loop.pending == 0
    while loop.finished:
        end_step(loop.finished.popleft())
    for batch in batches:
        tokens[batch.number].append(shared[batch.number].take(20).tolist())
    assert most > 1
    comm.close()
    return tokens


@pytest.mark.parametrize(
    "topology",
    [FoldedTopology(2), FoldedTopology(2, 4), FoldedTopology(3), LinearTopology(2)],
    ids=repr,
)
def test_same_tokens_as_in_one_process(ranks: Ranks, topology: Topology) -> None:
    expected = alone()
    assert len({str(tokens) for tokens in expected}) == BATCHES
    assert ranks.run(generate, topology.ranks, topology) == [expected] * topology.ranks


def parked() -> None:
    topology = FoldedTopology(2)
    comm = here.connect()
    loop: StageLoop[Batch] = StageLoop(comm, topology, compute_of(Model(), topology, comm.rank))
    for number in range(BATCHES):
        loop.submit(Batch(number))
    loop.step(20)
    assert loop.pending
    loop.park(20)
    assert len(loop.finished) == BATCHES
    assert not comm.ledger.pending_sends()
    here.meet("both are parked, and call nothing")
    with pytest.raises(ValueError, match="no batch is pending"):
        loop.step()
    comm.close()


def test_parking_leaves_no_continuation_and_no_send(ranks: Ranks) -> None:
    """Liveness C: a fold send whose receiver has parked would never be matched."""
    ranks.run(parked, 2)


def by_hand() -> Any:
    """An engine's own loop: continuations in its own order, and a limit that expires."""
    topology = FoldedTopology(2)
    comm = here.connect()
    stages = RankStages(comm, topology)
    compute = compute_of(Model(), topology, comm.rank)
    calls = BatchCalls(stages, Batch(0))
    if comm.rank == 0:
        assert not calls.ready
        calls.post()
        assert calls.ready
        sent = calls.run(compute)
        assert sent is not None
        calls.post()
        assert not calls.ready
        with pytest.raises(CommTimeout):
            calls.run(compute, 0)
        here.meet("rank 0 waits for the fold")
        assert calls.run(compute, 20) is None
        assert calls.done
    else:
        here.meet("rank 0 waits for the fold")
        failing = [True]

        def once_failing(batch: Batch, v: int, activation: Mapping[str, Any] | None) -> Any:
            if failing.pop() if failing else False:
                raise RuntimeError("no memory")
            return compute(batch, v, activation)

        with pytest.raises(RuntimeError, match="no memory"):
            calls.run(once_failing, 20)
        assert not calls.done
        calls.run(once_failing, 20)
        assert calls.done
    comm.close()
    return None if calls.result is None else calls.result.tolist()


def test_a_loop_of_the_engines_own(ranks: Ranks) -> None:
    batch = Batch(0)
    model = Model()
    hidden = model.embedding[batch.tokens]
    for index in range(LAYERS):
        hidden = model.layer(index, 0, hidden)
    assert ranks.run(by_hand, 2) == [model.sample(hidden).tolist(), None]


def wrong_size() -> None:
    comm = here.connect()
    with pytest.raises(CommError, match="the communicator has 2 ranks") as error:
        RankStages(comm, FoldedTopology(3))
    assert error.value.kind is ErrorKind.CONFIG
    with pytest.raises(CommError, match=r"channel .fold2.: it was not named"):
        RankStages(comm, FoldedTopology(2, 4))
    comm.close()


def test_a_topology_that_does_not_fit(ranks: Ranks) -> None:
    ranks.run(wrong_size, 2)
