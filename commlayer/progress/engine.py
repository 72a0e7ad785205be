"""What drives operations to completion when nobody waits.

Engines run the procedures of lanes.  `waiter` gives each lane a task that blocks in the
native wait, once per work and in order; `direct` lets who waits for an operation do that;
`polling` asks the transport's poll for all lanes.  Which one is sound follows from the
declared facts (`choose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from commlayer.progress.deadline import Deadline
from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Driven, Lane
from commlayer.progress.runtime import Event


class ProgressEngine(Protocol):
    """Runs the procedures of lanes."""

    @property
    def needs_calls(self) -> bool:
        """True if lanes move only inside calls on the communicator."""
        ...

    @property
    def batches(self) -> bool:
        """True if completions may be noticed in batches, up to 10 ms late."""
        ...

    def start(self, lane: Lane) -> None:
        """Have `lane` driven for a while from now on.  Called before every post.

        Raises `CommError` (FULL) where there is no thread for it; the next call tries again.
        """
        ...

    def wake(self, lane: Lane) -> None:
        """Say that `lane` has something to do.  Never raises."""
        ...

    def notice(self, operation: Operation) -> None:
        """Ask for `operation` to be completed promptly.  Never blocks."""
        ...

    def run_until(self, operation: Operation) -> bool:
        """Move the lane of `operation` on this thread until it is settled, where that is allowed.

        False if the caller is to wait for the operation's event instead.
        """
        ...

    def block(self, event: Event, timeout: float | None) -> bool:
        """Wait until `event` is set, driving lanes where the caller has to; False on timeout."""
        ...

    def join(self, lanes: Sequence[Driven], deadline: Deadline) -> bool:
        """Wait until the procedures of `lanes` have ended; False if one runs at `deadline`."""
        ...

    def stop(self) -> None:
        """Say that no lane will be started any more."""
        ...
