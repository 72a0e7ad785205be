"""What the check of a rule works with: a subject, worlds to put it in, and a place for evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from commlayer.errors import CommError
from commlayer_testkit.conformance.ranks.launcher import Launcher
from commlayer_testkit.conformance.ranks.pool import Process, Ranks, collect
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.conformance.verdict import CannotRun, NotApplicable

if TYPE_CHECKING:
    from commlayer_testkit.conformance.simulated import Body

RANK_LIMIT = 40.0
"""Seconds that ranks of one check may take."""


class Lab:
    """Worlds for one subject.  A context manager; leaving it ends all processes.

    `seed` is where random searches start; `schedules` bounds each search.
    `evidence` collects what the running check reports.
    """

    def __init__(self, subject: Subject, *, seed: int = 0, schedules: int = 200) -> None:
        self.subject = subject
        self.seed = seed
        self.schedules = schedules
        self.evidence: dict[str, Any] = {}
        self._pools: dict[bool, Ranks] = {}

    def explore(self, body: Body, size: int = 2, **settings: Any) -> None:
        """Play ``body(stage, rank)`` on `size` simulated ranks under many schedules.

        `settings` as of `commlayer_testkit.conformance.simulated.explore`.  Raises
        `AssertionError` with the failure and the choices that lead to it.
        """
        from commlayer_testkit.conformance.simulated import explore

        explore(self, body, size, **settings)

    def ranks(self, *, fresh: bool = False) -> Ranks:
        """The pool of real rank processes: forked, or with `fresh` new interpreters.

        Ranks of a backend that has a launcher run in its jobs.
        """
        if fresh not in self._pools:
            module = type(self.subject.loaded.backend).__module__
            self._pools[fresh] = Ranks(
                [module],
                fork=not fresh,
                launcher=Launcher(self._launcher, self.subject.rank_in_job),
            )
        return self._pools[fresh]

    def _launcher(self, size: int) -> Sequence[str]:
        try:
            return self.subject.loaded.backend.launcher(size)
        except CommError as error:
            raise CannotRun(str(error)) from error

    def kills_a_rank(self) -> None:
        """To be called first by a check that ends a rank by a signal."""
        command = self._launcher(2)
        if command:
            raise NotApplicable(
                f"ranks start under {Path(command[0]).name}: a job of the backend's own "
                "launcher ends with any rank that dies"
            )

    def spawn(self, body: Callable[..., Any], size: int, *arguments: Any) -> list[Process]:
        """Start ``body(subject, *arguments)`` on `size` real ranks; see `Ranks.spawn`.

        `body` is a function of an importable module.
        """
        self._count(size)
        return self.ranks().spawn(body, size, self.subject, *arguments)

    def run(
        self, body: Callable[..., Any], size: int, *arguments: Any, limit: float = RANK_LIMIT
    ) -> list[Any]:
        """What ``body(subject, *arguments)`` returns on each of `size` real ranks."""
        self._count(size)
        return self.ranks().run(body, size, self.subject, *arguments, timeout=limit)

    def _count(self, size: int) -> None:
        self.evidence["ranks"] = sorted({*self.evidence.get("ranks", ()), size})

    def collect(self, processes: Sequence[Process], limit: float = RANK_LIMIT) -> list[Any]:
        """The results of spawned ranks; the first that fails or is late fails all."""
        return collect(processes, limit)

    def clear(self) -> None:
        """End what the last check left behind."""
        self.evidence = {}
        for pool in self._pools.values():
            pool.end_processes()

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
