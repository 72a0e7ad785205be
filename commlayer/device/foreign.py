"""A handle, and retention, for asynchronous work that the library did not post.

Such work is never waited for before its owner waits: what a collective reads and writes is
kept alive by its work until then, and a wait lets go of it (c10d's device groups), whether
or not the operation has run.  So the work is held and asked, by the engines that drive lanes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from commlayer.device.completion import StreamCompletion
from commlayer.device.lane import DeviceWork, HeldWorks, PassedEvent
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind, OperationRef
from commlayer.progress.completion import HostCompletion, Waiting
from commlayer.progress.deadline import Deadline
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import DevicePart, LaneKey, Operation
from commlayer.progress.polling import PollingProgress
from commlayer.progress.procedure import Completes, NativeWork, Procedure
from commlayer.progress.runtime import Runtime
from commlayer.progress.waiter import WaiterProgress
from commlayer.semantics import Poll, Semantics, Threads, WaitBlocks


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

    def waits_for(self) -> str:
        return "what it waits for"


class _OnDevice:
    """Works and events that streams can wait for."""

    reports = "the device"

    def poll(self, work: DeviceWork) -> bool:
        return work.done()

    def wait(self, work: DeviceWork) -> None:
        """Nothing: it was polled complete, and its owner may not have waited yet."""


class _Event:
    """An event where the library knows of no device: the host asks it."""

    reports = "the device"

    def poll(self, event: Any) -> bool:
        return bool(event.query())

    def wait(self, event: Any) -> None:
        """Nothing: it has passed."""


class _Work:
    """A work that the host waits for."""

    reports = "the transport"

    def poll(self, work: Any) -> bool:
        return bool(work.is_completed())

    def wait(self, work: Any) -> None:
        work.wait()


class _StreamWork(_Work):
    """A work of a transport whose wait orders streams."""

    def poll(self, work: Any) -> bool:
        over = bool(work.is_completed())
        error = work.exception()
        if error is not None:
            raise error
        return over


_NUMBERS = itertools.count()


class _Tracking:
    """The one step of a tracked operation, as its engine sees it."""

    def __init__(self, tracker: Tracker, operation: Tracked, source: Any, work: Any) -> None:
        self.operation = operation
        # Not the slot alone: one is free again, and taken, before its engine has let go of it.
        self.name = f"track {operation.lane.tag}.{next(_NUMBERS)}"
        self.reports: str = source.reports
        self._tracker = tracker
        self._step: NativeWork | None = NativeWork(source, work)

    wanted = True

    def steps(self) -> Procedure:
        step, self._step = self._step, None
        try:
            yield step
        except Exception as error:
            del step
            self._tracker.settle(self, error)
            return
        del step
        self._tracker.settle(self, None)

    def withdraw(self, operation: Operation) -> bool:
        """Nothing: the library did not post it."""
        return False

    def notice(self, sequence: int) -> None:
        """Nothing: its only step is on its way."""

    def wake(self) -> None:
        """Nothing: it makes no pause."""

    def abandon(self, error: BaseException) -> None:
        failure = error if isinstance(error, Exception) else RuntimeError(repr(error))
        self._tracker.settle(self, failure)


class Tracker:
    """Notices the completion of foreign work and holds what it reads and writes until then.

    Events, and works whose poll the declared collective facts call EXACT, are polled;
    every other work has a task that waits for it, once.
    """

    def __init__(
        self, runtime: Runtime, ledger: Ledger, side: DeviceSide | None, semantics: Semantics
    ) -> None:
        self._runtime = runtime
        self._ledger = ledger
        self._side = side
        self._semantics = semantics
        self._polling = PollingProgress(runtime, background=True) if side is None else side.progress
        self._waiting = WaiterProgress(runtime)
        polled = HostCompletion(ledger, self._polling, runtime)
        self.completion: Waiting = polled if side is None else StreamCompletion(polled, side)
        """What it means to wait for a tracked operation."""
        # Guards the slots of pending works; a leaf.
        self._lock = runtime.lock()
        self._pending: set[_Tracking] = set()
        self._free: list[int] = []
        self._slots = 0

    def track(
        self, work: Any, retain: Any, where: tuple[str, int], site: str | None = None
    ) -> Operation:
        """Hold `work` and `retain` until it is complete; `where` is a channel and a rank.

        Returns what is waited for by `completion`.
        Raises `CommError`: CONFIG for neither an event nor a work, UNSUPPORTED
        for a work that the library's own tasks may not touch.
        """
        what = f"{type(work).__module__}.{type(work).__qualname__}"
        source, held, polled = self._source(work, what)
        operation = self._enter(what, tuple(leaves(retain)), where, site)
        part = operation.device
        if part is not None and isinstance(source, _OnDevice):
            part.work = held
        tracking = _Tracking(self, operation, source, held)
        with self._lock:
            self._pending.add(tracking)
        (self._polling if polled else self._waiting).start(tracking)
        return operation

    def _source(self, work: Any, what: str) -> tuple[Completes, Any, bool]:
        """What knows when `work` is complete, as what it knows it, and whether it is polled."""
        facts, side = self._semantics.collective, self._side
        if _has(work, "query", "synchronize", "wait"):
            if side is None:
                return _Event(), work, True
            return _OnDevice(), PassedEvent(work, side.device, None), True
        if not _has(work, "wait", "is_completed"):
            raise CommError(
                ErrorKind.CONFIG,
                f"track of {what}",
                "it is neither an event (query, synchronize, wait) nor a work (wait, is_completed)",
                "Record an event after the work, and track that",
            )
        if side is not None and facts.wait_blocks is WaitBlocks.STREAM:
            if facts.poll is not Poll.EXACT or not facts.wait_repeatable:
                raise CommError(
                    ErrorKind.UNSUPPORTED,
                    f"track of {what}",
                    f"the backend declares poll = {facts.poll.name} and wait_repeatable = "
                    f"{facts.wait_repeatable} for works that complete on streams",
                    "Wait for the work on a stream, record an event there, and track that",
                )
            return _OnDevice(), HeldWorks(_StreamWork(), side.device, (work,)), True
        if self._semantics.threads is Threads.FUNNELED:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                f"track of {what}",
                f"the backend declares threads = {self._semantics.threads.name}, so that no "
                "other thread than the caller's may ask for its completion",
                "Wait for the work itself",
            )
        return _Work(), work, facts.poll is Poll.EXACT

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
        operation = Tracked(what, lane, self._runtime.now(), site)
        operation.retained = retained
        operation.nbytes = sum(item.nbytes for item in retained if isinstance(item, Tensor))
        if self._side is not None:
            operation.device = DevicePart()
            operation.notify = self._side.notify
        self._ledger.admit(operation)
        return operation

    def settle(self, tracking: _Tracking, error: Exception | None) -> None:
        """Note that its work is over.  Called by its engine."""
        operation = tracking.operation
        if error is None:
            self._ledger.complete(operation)
        else:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            side = self._side
            here = side is not None and side.device.failed_here(error)
            failure = CommError(
                ErrorKind.DEVICE if here else ErrorKind.PEER_LOST,
                operation,
                f"{tracking.reports} reports: {lines[0]}",
                "See that error; what it concerns may be unusable from now on",
            )
            failure.__cause__ = error
            self._ledger.fail(operation, failure)
        with self._lock:
            self._pending.discard(tracking)
            self._free.append(int(operation.lane.tag))

    def join(self, deadline: Deadline) -> bool:
        """Wait until nothing is pending; False if something is at `deadline`.  It goes on."""
        with self._lock:
            pending = list(self._pending)
        for tracking in pending:
            self._ledger.wait(tracking.operation, deadline.remaining())
        with self._lock:
            return not self._pending


def _has(value: Any, *methods: str) -> bool:
    return all(callable(getattr(value, method, None)) for method in methods)
