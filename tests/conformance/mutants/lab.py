"""A lab for many subjects in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commlayer_testkit.conformance import Outcome, Subject, Verdict, judge
from commlayer_testkit.conformance.lab import RANK_LIMIT, Lab
from commlayer_testkit.conformance.ranks.pool import Process, Ranks
from commlayer_testkit.conformance.rules import find_rule

from commlayer.errors import CommError
from mutants.mutant import Mutant

HANGING = 3.0
"""Seconds that the ranks of a check get where they are known to hang."""


class MutantLab(Lab):
    """Ranks of every subject are forked from one server; it is closed with `close_ranks`.

    A check gets `patience` seconds instead of those it asks for, if that is given.
    """

    shared: dict[bool, Ranks] = {}  # noqa: RUF012

    def __init__(self, subject: Subject, schedules: int, patience: float | None = None) -> None:
        super().__init__(subject, schedules=schedules)
        self._patience = patience
        self._pools = self.shared

    def ranks(self, *, fresh: bool = False) -> Ranks:
        if fresh not in self.shared:
            self.shared[fresh] = Ranks(["mutants.processes"], fork=not fresh)
        return self.shared[fresh]

    def run(
        self, body: Callable[..., Any], size: int, *arguments: Any, limit: float = RANK_LIMIT
    ) -> list[Any]:
        return super().run(body, size, *arguments, limit=self._patience or limit)

    def collect(self, processes: Sequence[Process], limit: float = RANK_LIMIT) -> list[Any]:
        return super().collect(processes, self._patience or limit)


def judged(mutant: Mutant, rule: str) -> Verdict:
    """The verdict of one rule on a mutant; it fails where the backend does not even load."""
    try:
        lab = MutantLab(mutant.subject(), mutant.schedules, HANGING if mutant.hangs else None)
        return judge(find_rule(rule), lab)
    except CommError as error:
        return Verdict(rule=rule, outcome=Outcome.FAILED, message=str(error))


def close_ranks() -> None:
    """End the servers that ranks are forked from."""
    for pool in MutantLab.shared.values():
        pool.close()
    MutantLab.shared.clear()
