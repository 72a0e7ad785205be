"""What plugins that observe are told (hook ``commlayer_event``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from commlayer.observe.report import Report
from commlayer.progress.operation import Operation

logger = logging.getLogger("commlayer")


class OperationEvent(msgspec.Struct, frozen=True, tag="operation"):
    """A moment in the life of an operation.

    `time` is of the monotonic clock, in seconds, and `age` counts from the post.
    `sequence` is -1 while the number of the message is not known, `step` is that
    of a broadcast or -1, `error` the kind of the error or empty.
    """

    moment: Literal["posted", "matched", "settled", "released"]
    rank: int
    kind: str
    channel: str
    tag: str
    peer: int
    direction: str
    sequence: int
    step: int
    nbytes: int
    time: float
    age: float
    error: str


class StallEvent(msgspec.Struct, frozen=True, tag="stall"):
    """A report was made because something has not moved."""

    report: Report


Event = OperationEvent | StallEvent


class EventObserver:
    """Calls `emit` with an event for everything that happens; its errors are logged, not raised."""

    def __init__(self, rank: int, now: Callable[[], float], emit: Callable[..., Any]) -> None:
        self._rank = rank
        self._now = now
        self._emit = emit
        self._released: dict[int, bool] = {}  # of operations that were posted and are not over

    def posted(self, operation: Operation) -> None:
        self._released[id(operation)] = False
        self._tell("posted", operation)

    def matched(self, operation: Operation) -> None:
        if id(operation) in self._released:
            self._tell("matched", operation)

    def settled(self, operation: Operation) -> None:
        released = self._released.get(id(operation))
        if released is not None:
            self._tell("settled", operation)
            if released:
                del self._released[id(operation)]

    def released(self, operation: Operation) -> None:
        if id(operation) in self._released:
            self._tell("released", operation)
            if operation.settled:
                del self._released[id(operation)]
            else:
                self._released[id(operation)] = True

    def waited(self, operation: Operation, since: float) -> None:
        pass

    def _tell(
        self, moment: Literal["posted", "matched", "settled", "released"], operation: Operation
    ) -> None:
        now = self._now()
        key, error = operation.lane, operation.error
        self.send(
            OperationEvent(
                moment,
                self._rank,
                operation.kind,
                key.channel,
                key.tag,
                key.peer,
                key.direction,
                operation.sequence,
                operation.step,
                operation.nbytes,
                now,
                now - operation.posted_at,
                "" if error is None else error.kind.value,
            )
        )

    def send(self, event: Event) -> None:
        try:
            self._emit(event=event)
        except Exception:
            logger.exception("commlayer: an observer of events")
