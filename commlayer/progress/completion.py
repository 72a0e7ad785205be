"""What it means to wait for an operation, on a transport that the host waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol

from commlayer.errors import CommTimeout
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import Operation
from commlayer.progress.runtime import Runtime


class Waiting(Protocol):
    """What it means to wait for an operation.  `timeout` is a checked number of seconds."""

    def wait(self, operation: Operation, timeout: float | None) -> None:
        """As `Handle.wait`."""
        ...

    def synchronize(self, operation: Operation, timeout: float | None) -> None:
        """As `Handle.synchronize`."""
        ...

    def look(self, operation: Operation) -> None:
        """Do what can be done without blocking for `operation` to be noticed as complete."""
        ...

    @property
    def needs_calls(self) -> bool:
        """True if operations may move only while a call looks at them."""
        ...

    def when_settled(self, operation: Operation, callback: Callable[[], object]) -> None:
        """As `Ledger.when_settled`."""
        ...


class HostCompletion:
    """Waiting blocks the host until the operation is complete."""

    def __init__(self, ledger: Ledger, progress: ProgressEngine, runtime: Runtime) -> None:
        self._ledger = ledger
        self._progress = progress
        self._runtime = runtime

    def wait(self, operation: Operation, timeout: float | None) -> None:
        if not self._ledger.wait(operation, timeout):
            self.expire(operation, timeout)
        if operation.error is not None:
            raise operation.error.again()

    synchronize = wait

    def look(self, operation: Operation) -> None:
        self._progress.notice(operation)

    @property
    def needs_calls(self) -> bool:
        return self._progress.needs_calls

    def when_settled(self, operation: Operation, callback: Callable[[], object]) -> None:
        self._ledger.when_settled(operation, callback)

    def expire(self, operation: Operation, limit: float | None) -> NoReturn:
        """Raise `CommTimeout` for a wait that was limited to `limit` seconds."""
        age = self._runtime.now() - operation.posted_at
        raise CommTimeout(
            operation,
            f"not complete {age:.3g} s after it was posted; the limit of {limit:g} s expired",
            f"The operation goes on: wait again, or see {operation.waits_for()}",
        )
