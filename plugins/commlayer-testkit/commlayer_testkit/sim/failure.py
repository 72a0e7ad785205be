"""What a schedule can end in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FailureKind(str, Enum):
    """The classes of failure that the simulator tells apart."""

    DEADLOCK = "deadlock"
    """Nothing can run and no timer is pending, or all that runs is polling."""
    LOST_MESSAGE = "lost_message"
    """A message was posted and will never be delivered."""
    USE_AFTER_FREE = "use_after_free"
    """A transport or a kernel touched memory that had been freed."""
    OVERWRITTEN = "overwritten"
    """A source changed between the post of its operation and the end of its read."""
    EARLY_READ = "early_read"
    """A result was used before its receive was complete."""
    LEAK = "leak"
    """Something is still retained at quiescence."""
    WATCHDOG = "watchdog"
    """An operation was on a device for longer than its watchdog allows."""
    ABORT = "abort"
    """A rank's process died in native code."""
    MISUSE = "misuse"
    """A call that the declared facts forbid."""
    ERROR = "error"
    """A rank raised, or a check of the scenario failed."""
    NONDETERMINISM = "nondeterminism"
    """The same choices gave two different runs."""


@dataclass(frozen=True)
class Failure:
    """One failure.

    `what` is one sentence.  `cycle` names the nodes of a wait-for cycle in
    order, if there is one; `lines` are the wait-for graph or the lifetimes.
    """

    kind: FailureKind
    what: str
    cycle: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{self.kind.value}: {self.what}"]
        if self.cycle:
            parts.append("  cycle: " + "\n      -> ".join([*self.cycle, self.cycle[0]]))
        parts += [f"  {line}" for line in self.lines]
        return "\n".join(parts)
