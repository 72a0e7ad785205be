"""Native works completed in order by a thread, so that completion needs nobody to wait.

A work of the engine's process groups may be waited once, and its own poll never
turns true on gloo.  A line runs one task after another and tells each task's
handle.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import LookedAt
from commlayer.progress.deadline import checked_timeout


class Task(LookedAt[Any]):
    """One step of a line; a `commlayer.Handle`.  `operation` names it in errors."""

    def __init__(self, operation: str, run: Callable[[], Any]) -> None:
        self.operation = operation
        self._run = run
        self._over = threading.Event()
        self._value: Any = None
        self._error: CommError | None = None
        self._posted_at = time.monotonic()

    def perform(self) -> None:
        """Run it, once, and let go of what it holds.  Called by the line."""
        try:
            self._value = self._run()
        except CommError as error:
            self._error = error
        except Exception as error:
            self._error = CommError(
                ErrorKind.PEER_LOST,
                self.operation,
                f"the transport failed: {error}",
                "See the log of the other rank",
            )
            self._error.__cause__ = error
        self._settle()

    def fail(self, error: CommError) -> None:
        """End it without running it."""
        self._error = error.again()
        self._settle()

    def _settle(self) -> None:
        del self._run
        self._over.set()

    def wait(self, timeout: float | None = None) -> None:
        if not self._over.wait(checked_timeout(timeout)):
            raise CommTimeout(
                self.operation,
                f"not complete {time.monotonic() - self._posted_at:.3g} s after it was posted",
                "The operation goes on: wait again, or see what the other rank does",
            )
        if self._error is not None:
            raise self._error.again()

    synchronize = wait

    def _look(self) -> bool:
        return self._over.is_set()

    def exception(self) -> CommError | None:
        return self._error

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._value


class Line:
    """Runs tasks in the order in which they are added; after one that failed, none is run.

    A later message cannot be told from the rest of the failed one.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._perform, name=name, daemon=True)
        self._thread.start()

    def add(self, operation: str, run: Callable[[], Any]) -> Task:
        task = Task(operation, run)
        self._tasks.put(task)
        return task

    def end(self, deadline: float) -> bool:
        """Whether all tasks were over at `deadline` (of the monotonic clock)."""
        self._tasks.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _perform(self) -> None:
        error: CommError | None = None
        while (task := self._tasks.get()) is not None:
            if error is not None:
                task.fail(error)
                continue
            task.perform()
            error = task.exception()
            del task
