"""Who is told what becomes of operations."""

from __future__ import annotations

from typing import Protocol

from commlayer.progress.operation import Operation


class Observer(Protocol):
    """Is told what becomes of operations.

    Called on whatever thread it happens, all but `matched` and `waited` under the ledger's
    lock: it must be quick, must not raise, and must not call back into the ledger.  An
    operation is settled before it is released, unless the reaping policy goes by
    other signs; one that could not be posted is released and never settled.
    """

    def posted(self, operation: Operation) -> None:
        """It was entered; its native operations follow."""
        ...

    def matched(self, operation: Operation) -> None:
        """A receive whose header is here: `sequence` is known, payload may still be on its way."""
        ...

    def settled(self, operation: Operation) -> None:
        """It is over, well or not: `error` says."""
        ...

    def released(self, operation: Operation) -> None:
        """Its buffers were let go of."""
        ...

    def waited(self, operation: Operation, since: float) -> None:
        """A thread that blocked for it at `since` has stopped waiting."""
        ...
