"""What a lane does, step by step, and what it waits for in between.

A procedure is a generator that yields each wait and is resumed when it is over.  So one
text serves every engine: a task that blocks, a thread that happens to wait, a loop that
polls, and the simulator.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

from commlayer.progress.runtime import Event


class Completes(Protocol):
    """What knows when a work is complete: an endpoint, of its own works."""

    def wait(self, work: Any) -> None:
        """Wait for `work` as `Endpoint.wait` does; after a `poll` that was true, at once."""
        ...

    def poll(self, work: Any) -> bool:
        """Whether `work` is over; called only where that is exact."""
        ...


class NativeWork(NamedTuple):
    """A posted native operation that a lane waits for, and who knows when it is complete."""

    source: Completes
    work: Any


class Wait(NamedTuple):
    """A wait for `event`, at most `seconds` long."""

    event: Event
    seconds: float | None = None


Step = NativeWork | Wait | None
"""What a lane waits for; ``None`` where an operation was settled and it goes on at once."""

Procedure = Generator[Step, None, None]


class Driven(Protocol):
    """What has a procedure."""

    @property
    def name(self) -> str: ...

    def steps(self) -> Procedure:
        """The procedure.  An error of a native work is thrown into it."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Called when the procedure itself died: every pending operation must fail."""
        ...


class Lane(Driven, Protocol):
    """A lane, as its engine sees it."""

    @property
    def wanted(self) -> bool:
        """True if a caller waits for this lane's current work."""
        ...

    def withdraw(self, operation: Any) -> bool:
        """Take back an operation for which nothing has happened yet; True if it was taken back."""
        ...

    def notice(self, sequence: int) -> None:
        """Note that somebody waits for the lane's operation of number `sequence`."""
        ...

    def wake(self) -> None:
        """End the lane's pause, if it makes one."""
        ...
