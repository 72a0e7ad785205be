"""What a workload is: cases, and what every rank does in one turn of one contender."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from commlayer_bench.contender import Contender

SIGNAL_TAG = 98


class Scale(str, Enum):
    """How much of a workload is run: for tests, for a first look, for the record."""

    tiny = "tiny"
    quick = "quick"
    full = "full"


class Case(NamedTuple):
    """One point of a workload.

    `x` is where it stands on the axis.  A case that takes long has at most `most_rounds`.
    """

    label: str
    x: float
    most_rounds: int = 1000


Turn = Callable[[], Mapping[str, float]]
"""One turn, called on every rank at the same time.  The values of rank 0 count, by metric."""


class Workload(ABC):
    """Something that contenders are compared at.

    `axis` says what the `x` of its cases is; `metrics` are the units of what a
    turn returns, by name.  `in_parts` says that they are parts of one time, and
    read side by side.  Ratios are to the contender `base`.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    axis: ClassVar[str]
    metrics: ClassVar[Mapping[str, str]]
    in_parts: ClassVar[bool] = False
    base: ClassVar[str] = "plain"

    def worlds(self, scale: Scale) -> Sequence[int]:
        """The numbers of ranks it is run on, each in a run of its own."""
        return (2,)

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        raise NotImplementedError

    def turns(
        self, case: Case, contenders: Sequence[Contender], here: Here
    ) -> Sequence[tuple[str, Turn]]:
        """The turns of a round, by name of the contender; in the same order on every rank."""
        prepared = [(c.name, self.prepare(case, c, here)) for c in contenders]
        return [(name, turn) for name, turn in prepared if turn is not None]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        """The turn of one contender on this rank; ``None`` if it does not take part."""
        raise NotImplementedError


class Here:
    """This rank, and what all contenders use alike: the clock and signals of one byte."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.now = time.perf_counter
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def meet(self) -> None:
        """Return once every rank has called it."""
        dist.barrier()

    def post_signal(self, peer: int) -> Any:
        """Post a byte to `peer`; returns the work, which must be waited."""
        return dist.isend(self._byte, peer, tag=SIGNAL_TAG)

    def signal(self, peer: int) -> None:
        """Send a byte to `peer` and return when it was received."""
        self.post_signal(peer).wait()

    def await_signal(self, peer: int) -> None:
        """Receive the byte of a signal."""
        work: Any = dist.irecv(torch.empty(1, dtype=torch.uint8), peer, tag=SIGNAL_TAG)
        work.wait()

    def agree(self, values: Sequence[float]) -> list[float]:
        """The `values` of rank 0, on every rank."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return [float(value) for value in shared]
