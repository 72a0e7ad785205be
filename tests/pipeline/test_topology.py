"""The V-shaped pipeline: every chunk once, sends that match receives."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.pipeline.topology import FoldedTopology, LinearTopology, Topology

SHAPES = [(n, v) for n in range(1, 9) for v in range(1, 5)]
every_topology = pytest.mark.parametrize(
    "topology",
    [FoldedTopology(n, v) for n, v in SHAPES] + [LinearTopology(n) for n in range(1, 9)],
    ids=repr,
)


def stages(topology: Topology) -> list[tuple[int, int]]:
    return [(r, v) for v in range(topology.virtual_stages) for r in range(topology.ranks)]


def chunks_of(topology: Topology, rank: int) -> set[int]:
    return {topology.chunk(v, rank) for v in range(topology.virtual_stages)}


def test_the_v_of_two_and_of_four_ranks() -> None:
    assert [chunks_of(FoldedTopology(2), r) for r in range(2)] == [{0, 3}, {1, 2}]
    assert [chunks_of(FoldedTopology(4), r) for r in range(4)] == [{0, 7}, {1, 6}, {2, 5}, {3, 4}]


@every_topology
def test_formulas_of_the_fold(topology: Topology) -> None:
    n, last_v = topology.ranks, topology.virtual_stages - 1
    for r, v in stages(topology):
        expected = v * n + r if v % 2 == 0 else (v + 1) * n - 1 - r
        assert topology.chunk(v, r) == expected
        assert topology.place(expected) == (r, v)
        turns = r == (n - 1 if v % 2 == 0 else 0)
        assert topology.fold(r, v) == (v < last_v and turns)
        end = n - 1 if topology.virtual_stages % 2 else 0
        assert topology.last(r, v) == (v == last_v and r == end)
        assert topology.first(r, v) == (v == 0 and r == 0)
        assert topology.sampling_rank == end


@every_topology
def test_who_receives_from_whom(topology: Topology) -> None:
    for r, v in stages(topology):
        folded = v > 0 and topology.fold(r, v - 1)
        source = topology.receives(r, v)
        assert (source is not None) == (not topology.first(r, v) and not folded)
        if source is not None:
            assert source.rank == (r - 1 if v % 2 == 0 else r + 1)
        target = topology.sends(r, v)
        assert (target is not None) == (not topology.last(r, v) and not topology.fold(r, v))


@every_topology
def test_every_send_has_its_receive(topology: Topology) -> None:
    sent, received = [], []
    for r, v in stages(topology):
        target, source = topology.sends(r, v), topology.receives(r, v)
        if target is not None:
            sent.append((r, target.rank, target.channel, topology.chunk(v, r) + 1))
        if source is not None:
            received.append((source.rank, r, source.channel, topology.chunk(v, r)))
    assert sorted(sent) == sorted(received)
    assert len({(src, dst, channel) for src, dst, channel, _ in sent}) == len(sent)
    assert {channel for _, _, channel, _ in sent} <= set(topology.channels)


@every_topology
def test_calls_hold_every_stage_once_and_begin_with_what_another_rank_sends(
    topology: Topology,
) -> None:
    for r in range(topology.ranks):
        calls = topology.calls(r)
        assert [v for call in calls for v in call] == list(range(topology.virtual_stages))
        for call in calls:
            assert topology.first(r, call[0]) or topology.receives(r, call[0]) is not None
            assert all(topology.fold(r, v) for v in call[:-1])
            assert not topology.fold(r, call[-1])


def test_fold_traffic_has_its_own_channel() -> None:
    v_of_three = FoldedTopology(3)
    sent = v_of_three.sends(2, 1)
    assert sent is not None
    assert (sent.rank, sent.channel) == (1, "fold")
    assert v_of_three.receives(1, 1) is not None
    assert v_of_three.receives(1, 1).channel == "fold"  # type: ignore[union-attr]
    assert v_of_three.sends(0, 0).channel == "data"  # type: ignore[union-attr]
    assert FoldedTopology(2, 4).channels == ("data", "fold", "fold2", "fold3")


@given(shape=st.sampled_from(SHAPES), more=st.integers(0, 100))
def test_every_layer_is_in_one_chunk(shape: tuple[int, int], more: int) -> None:
    topology = FoldedTopology(*shape)
    layers = topology.chunks + more
    ranges = topology.layers(layers)
    assert [layer for chunk in ranges for layer in chunk] == list(range(layers))
    sizes = [len(chunk) for chunk in ranges]
    share, longer = divmod(layers, topology.chunks)
    assert sizes == [share + 1] * longer + [share] * (topology.chunks - longer)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="3 layers cannot be shared by 4 chunks"):
        FoldedTopology(2).layers(3)
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        LinearTopology(0)
    with pytest.raises(ValueError, match="virtual_stages must be at least 1"):
        FoldedTopology(2, 0)
    with pytest.raises(ValueError, match="virtual stage 2 is not one of 2"):
        FoldedTopology(2).chunk(2, 0)
    with pytest.raises(ValueError, match="rank -1 is not one of 2"):
        FoldedTopology(2).chunk(0, -1)
    with pytest.raises(ValueError, match="chunk 4 is not one of 4"):
        FoldedTopology(2).place(4)


@dataclass(frozen=True)
class Interleaved(Topology):
    """Every sweep runs up the ranks: another topology, from its `chunk` alone."""

    ranks: int
    virtual_stages: int

    def chunk(self, v: int, rank: int) -> int:
        return v * self.ranks + rank


def test_another_topology_needs_only_its_chunks() -> None:
    topology = Interleaved(3, 2)
    assert topology.sampling_rank == 2
    assert topology.sends(2, 0).rank == 0  # type: ignore[union-attr]
    assert topology.receives(0, 1) == topology.receives(0, 1)
    assert topology.calls(2) == ((0,), (1,))
