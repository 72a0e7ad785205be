"""Clauses of the contract, and the rules that check one of them each at one level."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import Semantics
from commlayer_testkit.conformance.clauses import CLAUSES, Clause

if TYPE_CHECKING:
    from commlayer_testkit.conformance.lab import Lab

    Check = Callable[[Lab], None]


class Level(str, Enum):
    """How much of the contract is checked, and on what.  A level includes those before it."""

    L0 = "L0"
    """Shape: signatures, facts, viability; nothing is sent."""
    L1 = "L1"
    """Simulated: the library on the declared facts, under exploration; no real transport."""
    L2 = "L2"
    """Processes: the real transport between ranks of one host."""
    L3 = "L3"
    """Devices and streams; only where two devices exist."""
    L4 = "L4"
    """Stress and faults: churn, hostile peers, ranks that stop or die."""

    @property
    def heading(self) -> str:
        return _TITLES[self]

    def includes(self, other: Level) -> bool:
        return other.value <= self.value


_TITLES = {
    Level.L0: "shape",
    Level.L1: "simulated",
    Level.L2: "processes",
    Level.L3: "devices and streams",
    Level.L4: "stress and faults",
}


@dataclass(frozen=True)
class Gate:
    """A condition on declared facts.  `text` states it, as in "p2p.poll is exact"."""

    text: str
    holds: Callable[[Semantics], bool]


@dataclass(frozen=True)
class Rule:
    """One check of one clause at one level.

    `check(lab)` returns when the clause holds and raises when it does not;
    `doc` says how it looks.  It is meaningful only where all `gates` hold.
    """

    level: Level
    clause: Clause
    gates: tuple[Gate, ...]
    check: Check

    @property
    def id(self) -> str:
        """Stable: ``L2-wait-again``."""
        return f"{self.level.value}-{self.clause.id}"

    @property
    def doc(self) -> str:
        """How it looks, in a line: the docstring of its check."""
        return " ".join((self.check.__doc__ or "").split())

    def applies(self, semantics: Semantics) -> bool:
        """Whether the declared facts make the clause meaningful."""
        return not self.unmet(semantics)

    def unmet(self, semantics: Semantics) -> str:
        """The first condition on the facts that does not hold, or nothing."""
        return next((gate.text for gate in self.gates if not gate.holds(semantics)), "")


_RULES: dict[str, Rule] = {}


def rule(level: Level, clause: str, *gates: Gate) -> Callable[[Check], Check]:
    """Register the decorated function as the check of `clause` at `level`."""

    def register(check: Check) -> Check:
        made = Rule(level, CLAUSES[clause], gates, check)
        if made.id in _RULES:
            raise ValueError(f"two rules {made.id}")
        _RULES[made.id] = made
        return check

    return register


def all_rules(up_to: Level = Level.L4) -> list[Rule]:
    """Every rule of the levels that `up_to` includes, by level and in the order of the clauses."""
    import commlayer_testkit.conformance.checks  # noqa: F401

    order = {name: number for number, name in enumerate(CLAUSES)}
    found = [rule for rule in _RULES.values() if up_to.includes(rule.level)]
    return sorted(found, key=lambda rule: (rule.level.value, order[rule.clause.id]))


def find_rule(identifier: str, rules: Iterable[Rule] | None = None) -> Rule:
    """The rule of that id among `rules` (default: the kit's); raises `CommError` (CONFIG)."""
    for candidate in all_rules() if rules is None else rules:
        if candidate.id == identifier:
            return candidate
    raise CommError(
        ErrorKind.CONFIG,
        f"rule {identifier!r}",
        "there is no such rule",
        "`commlayer conformance --specification` lists them",
    )
