"""The second mount: simulated ranks under the real ``torch.distributed`` API.

Code that knows nothing of this library (``dist.isend``, ``dist.recv``,
``dist.broadcast``, object lists) runs unchanged: each rank has its own
``torch.distributed`` world, which is put in place whenever one of its tasks runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from commlayer_testkit.sim.operation import SimWork
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.world import World

NO_TIMEOUT = timedelta(milliseconds=-1)
"""What torch passes to ``Work.wait`` when its caller gave no limit."""


class SimProcessGroupWork(dist.Work):
    """The works of one call, as the ``Work`` that torch hands to its caller."""

    def __init__(self, works: Sequence[SimWork], results: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._works = list(works)
        self._results = list(results)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limit = None if timeout.total_seconds() <= 0 else timeout
        for work in self._works:
            work.wait(limit)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return self._results


class SimProcessGroup(dist.ProcessGroup):
    """A process group whose collectives and sends go through one simulated communicator."""

    def __init__(self, rank: Rank, name: str) -> None:
        super().__init__(rank.index, len(rank.world.ranks))  # type: ignore[call-arg]
        self._ranks = len(rank.world.ranks)
        self._endpoint = rank.endpoint(name)
        self._gather = rank.endpoint(f"{name} all-gather")
        self._index = rank.index

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        return SimProcessGroupWork([self._endpoint.isend(t, dst, tag) for t in tensors])

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        return SimProcessGroupWork([self._endpoint.irecv(t, src, tag) for t in tensors], tensors)

    def broadcast(  # type: ignore[override]
        self, tensors: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        works = [self._endpoint.broadcast(t, opts.rootRank) for t in tensors]
        return SimProcessGroupWork(works, tensors)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """One broadcast from each rank."""
        works = []
        for row, mine in zip(outputs, inputs, strict=True):
            row[self._index].copy_(mine)
            works += [self._gather.broadcast(out, src) for src, out in enumerate(row)]
        return SimProcessGroupWork(works, [t for row in outputs for t in row])

    def barrier(self, opts: Any = None) -> dist.Work:
        """One broadcast of a byte from each rank."""
        flags = [torch.zeros(1, dtype=torch.uint8) for _ in range(self._ranks)]
        works = [self._gather.broadcast(flag, src) for src, flag in enumerate(flags)]
        return SimProcessGroupWork(works, flags)


class TorchMount:
    """Puts each rank's ``torch.distributed`` world in place while its tasks run."""

    def __init__(self, world: World) -> None:
        self._outside = c10d._world
        self._worlds: dict[int, Any] = {}
        world.switched = self._switch
        world.at_close(lambda: self._switch(-1))

    def _switch(self, rank: int) -> None:
        c10d._world = self._worlds.get(rank, self._outside)

    def join(self, rank: Rank) -> None:
        """Give `rank` a world with a default group of all ranks; called by its task."""
        own = self._worlds[rank.index] = c10d._World()
        self._switch(rank.index)
        own.default_pg = self.new_group(rank, "default")

    def new_group(self, rank: Rank, name: str) -> SimProcessGroup:
        """Another group of all ranks, with a communicator of its own; pairs by `name`."""
        group = SimProcessGroup(rank, name)
        own = self._worlds[rank.index]
        own.pg_map[group] = ("sim", None)
        own.pg_names[group] = name
        own.pg_group_ranks[group] = {r: r for r in range(len(rank.world.ranks))}
        return group


def start_distributed(world: World, size: int, body: Callable[[Rank], object]) -> TorchMount:
    """Start `size` ranks that each run ``body(rank)`` with ``torch.distributed`` initialised."""
    mount = TorchMount(world)

    def joined(rank: Rank) -> None:
        mount.join(rank)
        body(rank)

    world.start(size, joined)
    return mount
