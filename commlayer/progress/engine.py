"""What drives operations to completion when nobody waits.

Each lane is a procedure (a generator) that yields what it waits for: a native
work or an event.  Engines run procedures: `waiter` gives each lane a
task that blocks in the native wait, once per work and in order; `direct` lets
who waits for an operation do that; `polling` asks the transport's poll for all
lanes.  Which one is sound follows from the declared facts (`engines`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from commlayer.backend import Endpoint
from commlayer.progress.deadline import Deadline
from commlayer.progress.runtime import Event

if TYPE_CHECKING:
    from commlayer.progress.operation import Operation


class NativeWork(NamedTuple):
    """A posted native operation that a lane waits for."""

    endpoint: Endpoint
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
        """Whether the native work that it waits for concerns anybody now."""
        ...

    def attend(self, operation: Operation) -> None:
        """Note that somebody waits for `operation`, one of the lane's."""
        ...

    def hurry(self) -> None:
        """End the lane's pause, if it makes one."""
        ...


class ProgressEngine(Protocol):
    """Runs the procedures of lanes."""

    @property
    def lingers(self) -> bool:
        """Whether lanes may leave operations that nobody waits for alone for a while."""
        ...

    def start(self, lane: Lane) -> None:
        """Begin to drive `lane`.  Called once per lane."""
        ...

    def nudge(self, lane: Lane) -> None:
        """Say that `lane` has become wanted."""
        ...

    def attend(self, operation: Operation) -> None:
        """Have `operation` complete as soon as it can, whoever waits; never blocks."""
        ...

    def drive(self, operation: Operation) -> bool:
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
