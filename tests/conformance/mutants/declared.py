"""Mutants that declare one fact wrongly; `commlayer probe` tells which and which way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from commlayer_gloo import SEMANTICS

from commlayer.backend import Backend
from commlayer.semantics import (
    Completion,
    DroppedWork,
    NativeTimeout,
    Order,
    PeerLoss,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    SizeMismatch,
    Threads,
)
from mutants.processes import (
    LargePostWaits,
    Lying,
    OneThreadAtATime,
    OvertakesAboveTwo,
)
from mutants.relay import Relay, TagsMerged


@dataclass(frozen=True)
class WrongFact:
    """Gloo, or gloo behind `relay`, that declares `value` for `fact`: too much, or too little.

    `quick` ones are measured in a second or two.
    """

    fact: str
    value: Any
    over: bool
    relay: type[Relay] = Relay
    quick: bool = False

    @property
    def name(self) -> str:
        value = getattr(self.value, "value", self.value)
        return f"{self.fact}-is-{value}-{'over' if self.over else 'under'}"

    def backend(self) -> Backend:
        kind, _, fact = self.fact.rpartition(".")
        declared: Semantics
        if kind:
            facts = msgspec.structs.replace(getattr(SEMANTICS, kind), **{fact: self.value})
            declared = msgspec.structs.replace(SEMANTICS, **{kind: facts})
        else:
            declared = msgspec.structs.replace(SEMANTICS, **{fact: self.value})
        return Lying(self.relay, declared)


WRONG_FACTS = (
    WrongFact("p2p.poll", Poll.EXACT, True),
    WrongFact("p2p.poll", Poll.BLOCKS, False),
    WrongFact("p2p.wait_repeatable", True, True),
    WrongFact("p2p.timeout", NativeTimeout.SAFE, True),
    WrongFact("p2p.dropped_work", DroppedWork.CONTINUES, True),
    WrongFact("p2p.dropped_work", DroppedWork.UNSAFE, False),
    WrongFact("p2p.eager_bytes", 64, True),
    WrongFact("p2p.post_may_block", PostMayBlock.NEVER, True, LargePostWaits),
    WrongFact("p2p.post_may_block", PostMayBlock.ALWAYS, False),
    WrongFact("p2p.order", Order.PER_TAG, True, OvertakesAboveTwo),
    WrongFact("p2p.order", Order.UNORDERED, False),
    WrongFact("p2p.max_outstanding_per_pair", 1, False),
    WrongFact("p2p.completion", Completion.DELIVERED, True),
    WrongFact("p2p.completion", Completion.LOCAL, False),
    WrongFact("p2p.size_mismatch", SizeMismatch.ERROR, True),
    WrongFact("p2p.peer_loss", PeerLoss.RAISES, True),
    WrongFact("p2p.peer_loss", PeerLoss.SILENT, False),
    WrongFact("p2p.errors_polled", True, True),
    WrongFact("p2p.contiguous_only", False, True, quick=True),
    WrongFact("collective.wait_repeatable", False, False),
    WrongFact("collective.timeout", NativeTimeout.DESTRUCTIVE, False),
    WrongFact("progress", Progress.ONLY_IN_CALLS, False),
    WrongFact("threads", Threads.MULTIPLE, True, OneThreadAtATime),
    WrongFact("tags", True, True, TagsMerged),
    WrongFact("tags", False, False),
)
