"""The virtual pipeline: two ranks, two virtual stages each, folded into a V.

With N ranks the first sweep goes 0 to N-1 and the second back; the fold rank N-1
runs stages v=0 and v=1 back to back.  One call of the step function runs one
stage for one batch; its continuation (the second stage on the other ranks) comes
in a later call, behind other batches' first calls.  So the send after the fold is
posted in an early call and its receive in a late one.
"""

from __future__ import annotations

from typing import Any

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario

BATCHES = 2
HIDDEN, FOLD = 1, 2


class _Stages:
    """The calls of one rank.  Rank 0 holds chunks 0 and 3, rank 1 chunks 1 and 2."""

    def __init__(self, rank: Rank, *, blocking_metadata: bool, fold_channel: str) -> None:
        self.rank = rank
        self.blocking = blocking_metadata
        self.metadata = rank.endpoint("metadata", GLOO)
        self.data = rank.endpoint("data")
        self.fold = rank.endpoint(fold_channel)
        self.kept: list[Any] = []

    def _send(self, what: str, batch: int, tag: int) -> None:
        channel = self.fold if tag == FOLD else self.data
        header, hidden = filled(batch, 16), self.rank.arena.full(batch, 16)
        with self.rank.naming(f"metadata of {what} of batch {batch}"):
            if self.blocking:
                self.metadata.send(header, 1 - self.rank.index, tag)
            else:
                work = self.metadata.isend(header, 1 - self.rank.index, tag)
                self.kept.append((work, header))
        with self.rank.naming(f"{what} of batch {batch}"):
            work = channel.isend(hidden, 1 - self.rank.index)
        self.kept.append((work, hidden))

    def _receive(self, what: str, batch: int, tag: int) -> None:
        channel = self.fold if tag == FOLD else self.data
        with self.rank.naming(f"metadata of {what} of batch {batch}"):
            self.metadata.recv(blank(16), 1 - self.rank.index, tag)
        hidden = self.rank.arena.empty(16)
        with self.rank.naming(f"receive of {what} of batch {batch}"):
            channel.irecv(hidden, 1 - self.rank.index).wait()
        self.rank.device.launch("stage", lambda t: None, reads=[hidden])

    def first_call(self, batch: int) -> None:
        if self.rank.index == 0:
            self._send("send", batch, HIDDEN)
        else:
            self._receive("send", batch, HIDDEN)
            self._send("fold send", batch, FOLD)

    def continuation(self, batch: int) -> None:
        if self.rank.index == 0:
            self._receive("fold send", batch, FOLD)

    def finish(self) -> None:
        for work, _ in self.kept:
            work.wait()
        self.rank.device.synchronize()
        self.kept.clear()


def _pipeline(
    rank: Rank, *, blocking_metadata: bool = False, fold_channel: str = "fold", parks: bool = False
) -> None:
    stages = _Stages(rank, blocking_metadata=blocking_metadata, fold_channel=fold_channel)
    for batch in range(BATCHES):
        stages.first_call(batch)
    if parks and rank.index == 0:
        with rank.naming("parked engine"):
            rank.sleep(3600.0)  # longer than the watchdog waits
    for batch in range(BATCHES):
        stages.continuation(batch)
    stages.finish()


@scenario("hccl", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def virtual_pipeline_blocking_metadata(rank: Rank) -> None:
    """Outcome A: rank 1 blocks in the metadata of a fold send, rank 0 in the next batch's."""
    _pipeline(rank, blocking_metadata=True)


@scenario("hccl", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def virtual_pipeline_one_channel(rank: Rank) -> None:
    """Outcome B: fold traffic shares the in-order communicator of the forward sweep."""
    _pipeline(rank, fold_channel="data")


@scenario("hccl", "nccl")
@on_ranks(2)
def virtual_pipeline(rank: Rank) -> None:
    """The cure: a communicator of its own for fold traffic, and metadata that does not block."""
    _pipeline(rank)


@scenario("hccl_connected", expect=FailureKind.WATCHDOG)
@on_ranks(2)
def virtual_pipeline_parked(rank: Rank) -> None:
    """Outcome C: the engine parks with continuations in flight; the device watchdog fires."""
    _pipeline(rank, parks=True)
