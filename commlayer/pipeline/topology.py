"""Where the chunks of a model live, and which rank sends what to whom on which channel.

A model is cut into chunks of consecutive layers.  Each rank holds one chunk per
virtual stage; an activation visits the chunks in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol


@dataclass(frozen=True)
class Link:
    """The other end of a message between two stages, and the channel that carries it."""

    rank: int
    channel: str


class Topology(Protocol):
    """The interface of all topologies: inherit from it, give `chunk`, and the rest follows.

    `rank` runs from 0 to `ranks` - 1, a virtual stage `v` from 0 to
    `virtual_stages` - 1; others raise ``ValueError``.  Immutable, and the same
    on every rank.
    """

    ranks: int
    virtual_stages: int

    def chunk(self, v: int, rank: int) -> int:
        """The chunk that `rank` computes as its virtual stage `v`; a bijection."""
        ...

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return self.ranks * self.virtual_stages

    def place(self, chunk: int) -> tuple[int, int]:
        """Rank and virtual stage of `chunk`."""
        for v in range(self.virtual_stages):
            for rank in range(self.ranks):
                if self.chunk(v, rank) == chunk:
                    return rank, v
        raise ValueError(f"chunk {chunk!r} is not one of {self.chunks}")

    def layers(self, num_layers: int) -> tuple[range, ...]:
        """The layers of every chunk, in order: equal shares, the first chunks one more.

        Raises ``ValueError`` when there are fewer layers than chunks.
        """
        if num_layers < self.chunks:
            raise ValueError(f"{num_layers} layers cannot be shared by {self.chunks} chunks")
        share, more = divmod(num_layers, self.chunks)
        ends = accumulate((share + (chunk < more) for chunk in range(self.chunks)), initial=0)
        return tuple(range(start, end) for start, end in pairwise(ends))

    def first(self, rank: int, v: int) -> bool:
        """Whether this stage takes the model's input."""
        return self.chunk(v, rank) == 0

    def last(self, rank: int, v: int) -> bool:
        """Whether this stage gives the model's output, and so samples."""
        return self.chunk(v, rank) == self.chunks - 1

    def fold(self, rank: int, v: int) -> bool:
        """Whether the next chunk lies on the same rank: its activation stays in memory."""
        chunk = self.chunk(v, rank)
        return chunk + 1 < self.chunks and self.place(chunk + 1)[0] == rank

    @property
    def sampling_rank(self) -> int:
        """The rank that samples: the source of token broadcasts."""
        return self.place(self.chunks - 1)[0]

    def receives(self, rank: int, v: int) -> Link | None:
        """Where this stage's activation comes from; ``None`` for the first and after a fold."""
        chunk = self.chunk(v, rank)
        if chunk == 0:
            return None
        source, sweep = self.place(chunk - 1)
        return None if source == rank else Link(source, channel_of_sweep(sweep))

    def sends(self, rank: int, v: int) -> Link | None:
        """Where this stage's activation goes; ``None`` for the last and for a fold."""
        if self.last(rank, v) or self.fold(rank, v):
            return None
        return Link(self.place(self.chunk(v, rank) + 1)[0], channel_of_sweep(v))

    def calls(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of `rank` in the order they run, grouped into calls.

        The stages of one call run back to back for one batch; the next call of
        the batch, its continuation, needs a message from another rank.
        """
        calls: list[tuple[int, ...]] = []
        for v in range(self.virtual_stages):
            if v and self.fold(rank, v - 1):
                calls[-1] += (v,)
            else:
                calls.append((v,))
        return tuple(calls)

    @property
    def channels(self) -> tuple[str, ...]:
        """The channels in use, ``data`` first; name them in the configuration."""
        return tuple(channel_of_sweep(v) for v in range(self.virtual_stages))


def channel_of_sweep(v: int) -> str:
    """The channel of what virtual stages `v` send.

    A channel a sweep, so that a lane carries the batches in one order, whatever
    the order in which its ranks run first calls and continuations.  Where a
    communicator runs one operation at a time, each direction of a channel must
    have its own besides: a receive of one batch otherwise holds up the send of
    another (`commlayer_testkit.schedule.check` finds it with four ranks).
    """
    return ("data", "fold")[v] if v < 2 else f"fold{v}"


@dataclass(frozen=True)
class LinearTopology(Topology):
    """One chunk a rank, in the order of ranks."""

    ranks: int

    virtual_stages = 1

    def __post_init__(self) -> None:
        _check_positive(self)

    def chunk(self, v: int, rank: int) -> int:
        _check_stage(self, v, rank)
        return rank


@dataclass(frozen=True)
class FoldedTopology(Topology):
    """Sweeps to and fro: even virtual stages run up the ranks, odd ones down.

    With two virtual stages, a V: the last rank runs its two stages back to back,
    and rank 0 holds the first and the last chunk.
    """

    ranks: int
    virtual_stages: int = 2

    def __post_init__(self) -> None:
        _check_positive(self)

    def chunk(self, v: int, rank: int) -> int:
        _check_stage(self, v, rank)
        return v * self.ranks + (rank if v % 2 == 0 else self.ranks - 1 - rank)


def _check_positive(topology: Topology) -> None:
    for name in ("ranks", "virtual_stages"):
        if getattr(topology, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(topology, name)!r}")


def _check_stage(topology: Topology, v: int, rank: int) -> None:
    if not 0 <= rank < topology.ranks:
        raise ValueError(f"rank {rank!r} is not one of {topology.ranks}")
    if not 0 <= v < topology.virtual_stages:
        raise ValueError(f"virtual stage {v!r} is not one of {topology.virtual_stages}")
