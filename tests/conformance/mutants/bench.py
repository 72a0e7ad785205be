"""A bench for many subjects in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commlayer.conformance import Bench, Subject
from commlayer.conformance.ranks.pool import Process, Ranks

PATIENCE = 5.0
"""Seconds that the ranks of one check get; what hangs then counts as hanging."""


class MutantBench(Bench):
    """Ranks of every subject are forked from one server; it is closed with `close_ranks`.

    A check gets `patience` seconds where it asks for more.
    """

    shared: dict[bool, Ranks] = {}  # noqa: RUF012

    def __init__(self, subject: Subject, schedules: int, patience: float = PATIENCE) -> None:
        super().__init__(subject, schedules=schedules)
        self._patience = patience
        self._pools = self.shared

    def ranks(self, *, fresh: bool = False) -> Ranks:
        if fresh not in self.shared:
            self.shared[fresh] = Ranks(["mutants.processes"], fork=not fresh)
        return self.shared[fresh]

    def run(
        self, body: Callable[..., Any], size: int, *arguments: Any, limit: float = PATIENCE
    ) -> list[Any]:
        return super().run(body, size, *arguments, limit=max(self._patience, limit / 4))

    def collect(self, processes: Sequence[Process], limit: float = PATIENCE) -> list[Any]:
        return super().collect(processes, min(self._patience, limit))


def close_ranks() -> None:
    """End the server that ranks are forked from."""
    for pool in MutantBench.shared.values():
        pool.close()
    MutantBench.shared.clear()
