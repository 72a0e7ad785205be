"""Noticing that something has not moved for too long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.runtime import Runtime, Task
from commlayer.wire.rank_state import RankState
from commlayer.wire.tags import BROADCAST

logger = logging.getLogger("commlayer")


class StallWatch:
    """Decides when a report is due: once when something is stuck, again when it has aged twofold.

    Stuck is an operation that is `limit` seconds old, receives on `may_idle` channels
    excepted, and a broadcast that has been here for so long without being asked for.
    """

    def __init__(self, limit: float, may_idle: Collection[str] = ()) -> None:
        self._limit = limit
        self._may_idle = may_idle
        self._what: Hashable = None
        self._age = 0.0

    def due(self, state: RankState) -> str:
        """Why a report is due, or an empty text."""
        ages: list[tuple[float, Hashable]] = [
            (each.age, (each.channel, each.tag, each.peer, each.direction, each.number))
            for each in state.operations
            if each.direction != "recv" or each.channel not in self._may_idle
        ]
        ages += [
            (lane.seconds, (lane.channel, lane.tag, lane.peer, lane.count))
            for lane in state.lanes
            if lane.unclaimed and lane.tag == BROADCAST
        ]
        age, what = max(ages, key=lambda entry: entry[0], default=(0.0, None))
        if age < self._limit or (what == self._what and age < 2 * self._age):
            return ""
        self._what, self._age = what, age
        return f"something has not moved for {age:.1f} s (stall_timeout = {self._limit:g} s)"


class Watchdog:
    """A task that calls `check` every `interval` seconds, and when woken.

    Where it dies, `died` is called with an error that says so.
    """

    def __init__(
        self,
        runtime: Runtime,
        interval: float,
        check: Callable[[], None],
        died: Callable[[CommError], None],
    ) -> None:
        self._runtime = runtime
        self._interval = interval
        self._check = check
        self._died = died
        self._wake = runtime.event()
        self._stopped = False
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._runtime.spawn(self._run, "commlayer monitor")

    def wake(self) -> None:
        """Have it check now.  Safe under any lock of the library's."""
        self._wake.set()

    def stop(self) -> None:
        """End it; called on any task but its own."""
        self._stopped = True
        self._wake.set()
        if self._task is not None:
            self._task.join(1.0)

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait(self._interval)
                self._wake.clear()
                if self._stopped:
                    return
                self._check()
        except BaseException as failure:
            logger.exception("commlayer: the monitor died")
            error = CommError(
                ErrorKind.PROTOCOL,
                "monitor of operations that do not move",
                f"its task died ({type(failure).__name__}: {failure}), and nothing else would "
                "notice that ranks wait for each other",
                "This is a defect of commlayer; see the log",
            )
            error.__cause__ = failure
            self._died(error)
