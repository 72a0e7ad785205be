"""What an experiment is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from commlayer_testkit.conformance.probes.facts import COLLECTIVE, P2P
from commlayer_testkit.conformance.probes.rank import ProbeRank


class Missing(Exception):
    """An observation that a judge needs was not made; says how the rank ended instead."""


@dataclass
class Outcome:
    """What one rank noted, and how it ended.

    `ended` is ``"cut short"`` for a rank that was killed at the hard limit.
    """

    rank: int
    notes: dict[str, Any] = field(default_factory=dict)
    ended: Literal["returned", "concluded", "raised", "died", "cut short"] = "cut short"
    detail: str = ""

    def __getitem__(self, name: str) -> Any:
        if name not in self.notes:
            raise Missing(f"rank {self.rank} {self.ending} before it noted {name!r}")
        return self.notes[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.notes.get(name, default)

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        return f"{self.ended} ({self.detail})" if self.detail else self.ended


Pair = tuple[Outcome, Outcome]


@dataclass(frozen=True)
class Measurement:
    """The value of a fact as measured, or why there is none.

    `proven` is false for a value that an experiment can refute but not prove.
    """

    value: Any = None
    evidence: tuple[str, ...] = ()
    repetitions: int = 1
    why_not: str = ""
    proven: bool = True


def unmeasured(why: str, *evidence: str) -> Measurement:
    return Measurement(None, evidence, 0, why)


@dataclass(frozen=True)
class Experiment:
    """Two throw-away ranks that `play`, and a `judge` that reads their notes.

    `play` is a function at the top of a module: it is called in the ranks, once for
    each of the `variants`, which have ranks of their own.  `judge` maps the outcomes
    by variant to a measurement per fact; a `Missing` it raises means not measured.
    `kinds` says for which operations the experiment makes sense; a fact that is not
    of an operation kind is measured with p2p.
    """

    facts: tuple[str, ...]
    play: Callable[[ProbeRank, str], None]
    judge: Callable[[Mapping[str, Pair]], Mapping[str, Measurement]]
    variants: tuple[str, ...] = ("",)
    kinds: tuple[str, ...] = (P2P, COLLECTIVE)
    whole_transport: tuple[str, ...] = ()
    """Those of `facts` that are not of an operation kind."""

    def names(self, kind: str) -> list[str]:
        """The facts by full name, such as ``p2p.poll`` or ``progress``."""
        return [self.name(fact, kind) for fact in self.facts]

    def name(self, fact: str, kind: str) -> str:
        return fact if fact in self.whole_transport else f"{kind}.{fact}"
