"""The times of every operation, from post to release."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from commlayer.progress.observer import Observer
from commlayer.progress.operation import LaneKey, Operation

logger = logging.getLogger("commlayer")


class Span(NamedTuple):
    """One operation that is over.  Times are of the monotonic clock, 0 where unknown.

    `matched` is when the header of a receive was here, `settled` when the
    operation was over and `released` when its buffers were let go of.
    `error` is the kind of its error, or empty.
    """

    kind: str
    lane: LaneKey
    sequence: int
    step: int
    nbytes: int
    posted: float
    matched: float
    settled: float
    released: float
    error: str
    site: str | None


class Sink(Protocol):
    """Gets what is over.  Called under the ledger's lock: it must be quick.

    What it raises is logged.
    """

    def finished(self, span: Span) -> None: ...

    def waited(self, operation: Operation, since: float, until: float) -> None: ...


class _Open:
    __slots__ = ("matched", "operation", "released", "settled")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.matched = 0.0
        self.settled = 0.0
        self.released = 0.0


class Spans:
    """Observes a ledger and hands a `Span` to every sink when an operation is over and released.

    One that could not be posted is forgotten.
    """

    def __init__(self, now: Callable[[], float], sinks: Sequence[Sink]) -> None:
        self._now = now
        self._sinks = tuple(sinks)
        self._open: dict[int, _Open] = {}

    def posted(self, operation: Operation) -> None:
        self._open[id(operation)] = _Open(operation)

    def matched(self, operation: Operation) -> None:
        entry = self._open.get(id(operation))
        if entry is not None:
            entry.matched = self._now()

    def settled(self, operation: Operation) -> None:
        entry = self._open.get(id(operation))
        if entry is not None:
            entry.settled = self._now()
            if entry.released:
                self._finish(entry)

    def released(self, operation: Operation) -> None:
        entry = self._open.get(id(operation))
        if entry is None:
            return
        entry.released = self._now()
        if entry.settled:
            self._finish(entry)
        elif operation.settled:
            del self._open[id(operation)]

    def waited(self, operation: Operation, since: float) -> None:
        until = self._now()
        for sink in self._sinks:
            try:
                sink.waited(operation, since, until)
            except Exception:
                logger.exception("commlayer: %s", type(sink).__name__)

    def _finish(self, entry: _Open) -> None:
        del self._open[id(entry.operation)]
        span = _span(entry)
        for sink in self._sinks:
            try:
                sink.finished(span)
            except Exception:
                logger.exception("commlayer: %s", type(sink).__name__)

    def open(self) -> list[Span]:
        """Operations that are not over yet, as far as they are."""
        return [_span(entry) for entry in list(self._open.values())]


def _span(entry: _Open) -> Span:
    operation = entry.operation
    error = operation.error
    return Span(
        operation.kind,
        operation.lane,
        operation.sequence,
        operation.step,
        operation.nbytes,
        operation.posted_at,
        entry.matched,
        entry.settled,
        entry.released,
        "" if error is None else error.kind.value,
        operation.site,
    )


class FanOut:
    """Passes everything on to several observers."""

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)

    def posted(self, operation: Operation) -> None:
        for observer in self._observers:
            observer.posted(operation)

    def matched(self, operation: Operation) -> None:
        for observer in self._observers:
            observer.matched(operation)

    def settled(self, operation: Operation) -> None:
        for observer in self._observers:
            observer.settled(operation)

    def released(self, operation: Operation) -> None:
        for observer in self._observers:
            observer.released(operation)

    def waited(self, operation: Operation, since: float) -> None:
        for observer in self._observers:
            observer.waited(operation, since)
