"""A handle, and retention, for asynchronous work that the library did not post."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from commlayer.device.device import DeviceEvent
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, CommTimeout, ErrorKind, OperationRef
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.runtime import Runtime
from commlayer.semantics import Poll, Semantics, Threads, WaitBlocks

FIRST_PAUSE = 0.0005
LONGEST_PAUSE = 0.01
"""Seconds between two rounds of polling: doubled from first to longest while nothing completes."""


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no container, in order.

    Containers are mappings (their values), lists, tuples, sets and dataclasses,
    nested to any depth.
    """
    pending = [value]
    seen: set[int] = set()
    while pending:
        item = pending.pop()
        inner: Iterator[Any] | None = None
        if isinstance(item, Mapping):
            inner = iter(item.values())
        elif isinstance(item, (list, tuple, AbstractSet)):
            inner = iter(item)
        elif is_dataclass(item) and not isinstance(item, type):
            inner = (getattr(item, field.name) for field in fields(item))
        if inner is None:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            pending.extend(reversed(list(inner)))


class Tracked(Operation):
    """The record of one piece of foreign work; never a send to the bounds."""

    __slots__ = ("what",)

    def __init__(self, what: str, lane: LaneKey, posted_at: float, site: str | None) -> None:
        super().__init__("track", lane, 0, posted_at, site)
        self.what = what

    def describe(self) -> OperationRef:
        text = f"tracked {self.what}" + (f" (posted at {self.site})" if self.site else "")
        return OperationRef(text, self.kind, channel=self.lane.channel)


class _EventSource:
    """Completion of a device event."""

    reports = "the device"

    def __init__(self, event: DeviceEvent) -> None:
        self.event = event

    def poll(self) -> bool:
        return bool(self.event.query())


class _PolledWork:
    """Completion of a work whose poll is exact."""

    reports = "the transport"

    def __init__(self, work: Any) -> None:
        self._work = work

    def poll(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()
        return True


class TrackHandle:
    """The handle of tracked work, with the contract of `commlayer.Handle`.

    Of an event on a communicator with a device, `wait` orders the calling
    thread's current stream after it and does not block the host; `synchronize`
    does.  Otherwise both block the host.  `result` is ``None``.
    """

    __slots__ = ("_event", "_operation", "_tracker")

    def __init__(self, operation: Tracked, tracker: Tracker, event: DeviceEvent | None) -> None:
        self._operation = operation
        self._tracker = tracker
        self._event = event

    def wait(self, timeout: float | None = None) -> None:
        if self._event is None or self._tracker.device is None or self._operation.settled:
            self.synchronize(timeout)
            return
        checked_timeout(timeout)
        self._event.wait()

    def synchronize(self, timeout: float | None = None) -> None:
        operation = self._operation
        limit = checked_timeout(timeout)
        if not self._tracker.ledger.wait(operation, limit):
            raise CommTimeout(
                operation.describe(),
                f"not complete {self._tracker.runtime.now() - operation.posted_at:.3g} s after it "
                f"was handed over; the limit of {limit:g} s expired",
                "The work goes on: wait again, or see what it waits for",
            )
        if operation.error is not None:
            raise operation.error.again()

    def is_completed(self) -> bool:
        if not self._operation.settled:
            self._tracker.poll_once()
        return self._operation.settled

    def exception(self) -> CommError | None:
        return self._operation.error

    def result(self, timeout: float | None = None) -> None:
        self.wait(timeout)

    def __repr__(self) -> str:
        operation = self._operation
        state = "pending" if not operation.settled else "failed" if operation.error else "complete"
        return f"<{state}: {operation.describe()}>"


class Tracker:
    """Notices the completion of foreign work and holds what it reads and writes until then.

    Events, and works whose poll the declared collective facts call EXACT, are
    polled by one task that lives while there are any; every other work has a
    task that waits for it, once.  A work of a transport that completes on
    streams becomes an event: a stream that nothing else uses waits for it.
    """

    def __init__(
        self, runtime: Runtime, ledger: Ledger, device: DeviceSide | None, semantics: Semantics
    ) -> None:
        self.runtime = runtime
        self.ledger = ledger
        self.device = device
        self._semantics = semantics
        self._lock = runtime.lock()
        self._polled: dict[int, tuple[Tracked, _EventSource | _PolledWork]] = {}
        self._polling = False
        self._asking = False
        self._waited: set[Tracked] = set()
        self._free: list[int] = []
        self._slots = 0
        self._stream: Any = None

    def track(
        self, work: Any, retain: Any, where: tuple[str, int], site: str | None = None
    ) -> TrackHandle:
        """Hold `retain` until `work` is complete; `where` is the channel and rank to list it under.

        Raises `CommError`: CONFIG for neither an event nor a work, UNSUPPORTED
        for a work that the library's own tasks may not touch.
        """
        what = f"{type(work).__module__}.{type(work).__qualname__}"
        event: DeviceEvent | None = None
        source: _EventSource | _PolledWork | None = None
        if _has(work, "query", "synchronize", "wait"):
            event = work
        elif _has(work, "wait", "is_completed"):
            event = self._event_after(work)
            if event is None:
                self._check_threads(what)
                if self._semantics.collective.poll is Poll.EXACT:
                    source = _PolledWork(work)
        else:
            raise CommError(
                ErrorKind.CONFIG,
                f"track of {what}",
                "it is neither an event (query, synchronize, wait) nor a work (wait, is_completed)",
                "Record an event after the work, and track that",
            )
        if event is not None:
            source = _EventSource(event)
        operation = self._enter(what, tuple(leaves(retain)), where, site)
        handle = TrackHandle(operation, self, event)
        if source is None:
            self._wait_for(operation, work)
        else:
            self._poll_for(operation, source)
        return handle

    def _check_threads(self, what: str) -> None:
        if self._semantics.threads is not Threads.MULTIPLE:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                f"track of {what}",
                f"the backend declares threads = {self._semantics.threads.name}, so that no "
                "other thread than the caller's may ask for its completion",
                "Wait for the work itself",
            )

    def _event_after(self, work: Any) -> DeviceEvent | None:
        """An event that follows `work`, where works complete on streams; no stream is held up."""
        side = self.device
        if side is None or self._semantics.collective.wait_blocks is not WaitBlocks.STREAM:
            return None
        with side.lock:
            if self._stream is None:
                self._stream = side.device.stream()
            event = side.device.event()
            with self._stream:
                work.wait()
                event.record(self._stream)
        return event

    def _enter(
        self, what: str, retained: tuple[Any, ...], where: tuple[str, int], site: str | None
    ) -> Tracked:
        # Works complete in any order and lanes release in order: each pending work has its own.
        with self._lock:
            if self._free:
                slot = self._free.pop()
            else:
                slot = self._slots
                self._slots += 1
        channel, rank = where
        lane = LaneKey(channel, rank, "track", str(slot))
        operation = Tracked(what, lane, self.runtime.now(), site)
        operation.retained = retained
        operation.nbytes = sum(item.nbytes for item in retained if isinstance(item, Tensor))
        if self.device is not None:
            operation.notify = self.device.notify
        self.ledger.admit(operation)
        return operation

    def _wait_for(self, operation: Tracked, work: Any) -> None:
        with self._lock:
            self._waited.add(operation)

        def wait() -> None:
            error: Exception | None = None
            try:
                work.wait()
            except Exception as raised:
                error = raised
            self._settle(operation, error, "the transport")

        self.runtime.spawn(wait, f"commlayer track {operation.lane.tag}")

    def _poll_for(self, operation: Tracked, source: _EventSource | _PolledWork) -> None:
        with self._lock:
            self._polled[id(operation)] = (operation, source)
            start, self._polling = not self._polling, True
        if start:
            self.runtime.spawn(self._poll, "commlayer track")

    def _poll(self) -> None:
        pause = FIRST_PAUSE
        while True:
            moved = self.poll_once()
            with self._lock:
                if not self._polled:
                    self._polling = False
                    return
            pause = FIRST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)
            self.runtime.sleep(pause)

    def poll_once(self) -> bool:
        """Settle whatever is complete; True if anything was.

        Never blocks: returns at once if another task is doing so.
        """
        with self._lock:
            if self._asking:
                return False
            self._asking = True
            polled = list(self._polled.values())
        try:
            moved = False
            for operation, source in polled:
                moved |= self._ask(operation, source)
            return moved
        finally:
            self._asking = False

    def _ask(self, operation: Tracked, source: _EventSource | _PolledWork) -> bool:
        error: Exception | None = None
        try:
            if not source.poll():
                return False
        except Exception as raised:
            error = raised
        self._settle(operation, error, source.reports)
        return True

    def _settle(self, operation: Tracked, error: Exception | None, reports: str) -> None:
        if error is None:
            self.ledger.complete(operation)
        else:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            failure = CommError(
                ErrorKind.PEER_LOST,
                operation.describe(),
                f"{reports} reports: {lines[0]}",
                "See that error; what it concerns may be unusable from now on",
            )
            failure.__cause__ = error
            self.ledger.fail(operation, failure)
        with self._lock:
            self._polled.pop(id(operation), None)
            self._waited.discard(operation)
            self._free.append(int(operation.lane.tag))

    def join(self, deadline: Deadline) -> bool:
        """Wait until nothing is pending; False if something is at `deadline`.  It goes on."""
        for operation in self._pending():
            self.ledger.wait(operation, deadline.remaining())
        return not self._pending()

    def _pending(self) -> list[Tracked]:
        with self._lock:
            return [*(operation for operation, _ in self._polled.values()), *self._waited]


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
