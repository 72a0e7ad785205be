"""All operations in flight, bounded.

Every operation is here from before it is posted until its buffers are let go of, whether or
not anybody has a handle to it: that is what keeps memory alive that the transport still reads.
Settling and releasing are two steps.  An operation is *settled* when its outcome is known,
which wakes who waits; it is *released* when the reaping policy says that nothing can read its
buffers any more.  One that failed may be settled long before: it is in quarantine until the
transport lets go.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from commlayer.config import CommConfig
from commlayer.errors import CommError, CommTimeout
from commlayer.progress.deadline import Deadline
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.lifetime import overwritten
from commlayer.progress.observer import Observer
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.reaping import ReapingPolicy
from commlayer.progress.retention import DeviceHold
from commlayer.progress.runtime import Event, Runtime
from commlayer.progress.snapshot import Snapshot, full, view

logger = logging.getLogger("commlayer")


Block = Callable[[Event, "float | None"], bool]
"""Waits for an event while whatever drives the lanes goes on; False when the time is up."""


class Ledger:
    """Holds every operation from post to release.

    Sends are admitted under the bounds; receives are listed but not counted.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        runtime: Runtime,
        reaping: ReapingPolicy,
        config: CommConfig,
        progress: ProgressEngine,
    ) -> None:
        self._runtime = runtime
        self._reaping = reaping
        self._config = config
        self._progress = progress
        self.block: Block = progress.block
        """How a thread waits; a connection that has a device puts its own here."""
        # Taken last: under it only the observer and the reaping policy are called.  Events are set
        # and `notify` is called after it, because they wake threads that need it.
        self._lock = runtime.lock()
        self._lanes: dict[LaneKey, deque[Operation]] = {}
        self._quarantine: dict[int, Operation] = {}
        self._wasted: set[LaneKey] = set()
        self._sends = 0
        self._bytes = 0
        self._peak_sends = 0
        self._peak_bytes = 0
        self._released = runtime.event()
        self._waiters = 0
        self._inherited: list[Operation] = []
        self.observer: Observer | None = None
        """Told of every operation; set before the first is entered."""

    def admit(self, operation: Operation, *, exempt: bool = False) -> None:
        """Enter `operation`, waiting for room if it is a send and the bound is reached.

        An empty lane admits one send of any size, and `exempt` sends are always
        admitted.  Raises `CommError` (FULL) naming the oldest send, at once or
        after ``full_timeout``.
        """
        if not self._try_admit(operation, exempt):
            self._wait_for_room(operation)

    def _try_admit(self, operation: Operation, exempt: bool) -> bool:
        with self._lock:
            try:
                if not self._reaping.background:
                    self._reap_all()
                lane = self._lanes.get(operation.lane)
                if lane is None:
                    lane = self._lanes[operation.lane] = deque()
                if operation.lane.direction == "send":
                    if not (exempt or not lane or self._has_room(operation.nbytes)):
                        return False
                    self._sends += 1
                    self._bytes += operation.nbytes
                    self._peak_sends = max(self._peak_sends, self._sends)
                    self._peak_bytes = max(self._peak_bytes, self._bytes)
                lane.append(operation)
                if self.observer is not None:
                    self.observer.posted(operation)
            except BaseException:
                self._recount()
                raise
            return True

    def _recount(self) -> None:
        """Count what is listed: a signal handler has interrupted a change of both."""
        sends = [o for key, lane in self._lanes.items() if key.direction == "send" for o in lane]
        self._sends = len(sends)
        self._bytes = sum(operation.nbytes for operation in sends)

    def _has_room(self, nbytes: int) -> bool:
        config = self._config
        return (
            self._sends < config.max_inflight_ops
            and self._bytes + nbytes <= config.max_inflight_bytes
        )

    def _wait_for_room(self, operation: Operation) -> None:
        if self._config.on_full == "raise":
            raise self._full(operation)
        deadline = Deadline(self._runtime.now, self._config.full_timeout)
        self._waiters += 1
        try:
            while True:
                # Cleared before the look: a release in between sets it again.
                self._released.clear()
                self.notice_all()
                if self._try_admit(operation, exempt=False):
                    return
                if not self.block(self._released, deadline.remaining()):
                    if self._try_admit(operation, exempt=False):
                        return
                    raise self._full(operation)
        finally:
            self._waiters -= 1
            # There may be room for another: an event wakes all, but this one cleared it.
            if self._waiters:
                self._released.set()

    def notice_all(self) -> None:
        """Have the driver of every lane of sends look at what has completed."""
        with self._lock:
            last = [
                lane[-1] for key, lane in self._lanes.items() if key.direction == "send" and lane
            ]
        for operation in last:
            self._progress.notice(operation)

    def _full(self, operation: Operation) -> CommError:
        with self._lock:
            sends = [o for lane in self._lanes.values() for o in lane if o.lane.direction == "send"]
            held = f"{self._sends} sends and {self._bytes} bytes are in flight"
        return full(operation, sends, held, self._runtime.now())

    def complete(self, operation: Operation, value: Any = None) -> bool:
        """Settle as complete, if no other part of it is pending.  False if already settled.

        `value` is what a receive yields.

        A send whose source was overwritten in flight, where that is checked,
        settles as failed (LIFETIME) instead.
        """
        fingerprint = operation.fingerprint
        if fingerprint is not None and fingerprint.changed():
            return self._settle(operation, None, overwritten(operation.describe()), ends=True)
        return self._settle(operation, value, None, ends=True)

    def complete_device_part(self, operation: Operation, value: Any = None) -> None:
        """As `complete`, for the part on the device."""
        part = operation.device
        assert part is not None
        part.done = True
        if part.hold is DeviceHold.EVENT:
            part.buffers = ()
        self.complete(operation, value)

    def fail(self, operation: Operation, error: CommError, *, quarantine: bool = False) -> bool:
        """Settle as failed.  False if already settled.

        An error about all traffic with a peer becomes one of this operation.

        `quarantine` lists it as given up while the transport still holds its
        buffers, until all its parts are complete.
        """
        return self._settle(operation, None, error.concerning(operation), quarantine)

    def _settle(
        self,
        operation: Operation,
        value: Any,
        error: CommError | None,
        quarantine: bool = False,
        *,
        ends: bool = False,
    ) -> bool:
        """`ends` says that a part of the operation has left the transport."""
        try:
            with self._lock:
                # Before anybody can see that it is settled, and let go of its handle.
                holder = operation.holder
                wasted = error is None and holder is not None and holder() is None
                settles = self._mark_settled(operation, value, error, quarantine, ends=ends)
                pending = not operation.settled
        except BaseException:
            # A signal handler raised in between: what it cut short is done here.
            with self._lock:
                self._recount()
            if operation.settled:
                self._tell(operation)
            raise
        if settles:
            self._tell(operation)
            if wasted:
                self._taken_by_nobody(operation)
        return settles or pending

    def _mark_settled(
        self,
        operation: Operation,
        value: Any,
        error: CommError | None,
        quarantine: bool,
        *,
        ends: bool,
    ) -> bool:
        if ends:
            operation.parts -= 1
        if operation.settled:
            if operation.parts <= 0:
                self._quarantine.pop(id(operation), None)
            return False
        if operation.parts and error is None:
            if self._reaping.background:
                self._reap(operation.lane)
            return False
        operation.value = value
        operation.error = error
        operation.settled = True
        if self.observer is not None:
            self.observer.settled(operation)
        if quarantine:
            self._quarantine[id(operation)] = operation
        if self._reaping.background:
            self._reap(operation.lane)
        else:
            self._notify()
        return True

    def _tell(self, operation: Operation) -> None:
        """Wake who waits for an operation that is settled."""
        event = operation.event
        if event is not None:
            event.set()
        if operation.notify is not None:
            operation.notify()
        if operation.callbacks:
            self._run(operation)

    def when_settled(self, operation: Operation, callback: Callable[[], object]) -> None:
        """Call `callback` once, when `operation` is settled: now, if it is.

        On any thread, the library's own included: it must be quick.  What it raises is logged.
        """
        with self._lock:
            # Under the lock, because `_settle` looks for callbacks after it has let go of it.
            operation.callbacks.append(callback)
            settled = operation.settled
        if settled:
            self._run(operation)

    def _run(self, operation: Operation) -> None:
        while True:
            with self._lock:
                if not operation.callbacks:
                    return
                callback = operation.callbacks.pop(0)
            try:
                callback()
            except Exception:
                logger.exception("commlayer: a done callback of %s", operation.describe())

    def _taken_by_nobody(self, operation: Operation) -> None:
        """Say once a lane that a message went to a receive whose handle was dropped."""
        if operation.lane not in self._wasted:
            self._wasted.add(operation.lane)
            logger.warning(
                "commlayer: %s has taken a message that nobody can get: its handle was dropped. "
                "Keep the handle of a receive whose limit expired and wait for it again, or "
                "cancel() it",
                operation.describe(),
            )

    def wait(self, operation: Operation, timeout: float | None) -> bool:
        """Block until `operation` is settled; False when `timeout` seconds have passed."""
        if not operation.settled:
            operation.awaited = True
            observer = self.observer
            since = 0.0 if observer is None else self._runtime.now()
            if not (timeout is None and self._progress.run_until(operation)):
                self._wait_for_event(operation, timeout)
            if observer is not None:
                observer.waited(operation, since)
        if not self._reaping.background:
            self.reap()
        return operation.settled

    def _wait_for_event(self, operation: Operation, timeout: float | None) -> None:
        if timeout is not None:
            self._progress.notice(operation)
        event = operation.event
        # Most operations are never waited for before they settle, so the event is made late, and
        # under the lock, because `_settle` looks for it.
        if event is None:
            with self._lock:
                if operation.event is None:
                    operation.event = self._runtime.event()
                event = operation.event
        while not operation.settled:
            if not self.block(event, timeout) or operation.settled or timeout is not None:
                return
            # Set without being settled: this thread is to move the lane.  Cleared before the
            # second look, so that a settling in between is not missed.
            event.clear()
            if not operation.settled and self._progress.run_until(operation):
                return

    def reap(self) -> None:
        """Release everything that the policy allows to be released."""
        with self._lock:
            self._reap_all()

    def remove(self, operation: Operation) -> None:
        """Take back an operation that was not posted, if it was entered."""
        with self._lock:
            lane = self._lanes.get(operation.lane, ())
            if operation not in lane:
                return  # not entered, or its post failed and took the peer's operations with it
            self._lanes[operation.lane].remove(operation)
            operation.settled = True
            self._release(operation)
            self._notify()

    def _reap_all(self) -> None:
        for key in list(self._lanes):
            self._reap(key)

    def _reap(self, key: LaneKey) -> None:
        lane = self._lanes.get(key)
        if not lane:
            return
        try:
            count = self._reaping.reapable(lane)
        except Exception:
            logger.exception("commlayer: reaping policy %r", self._reaping.name)
            return
        try:
            for _ in range(count):
                self._release(lane.popleft())
        except BaseException:
            self._recount()
            raise
        if count:
            self._notify()

    def _release(self, operation: Operation) -> None:
        operation.retained = ()
        operation.fingerprint = None
        if operation.device is not None:
            operation.device.buffers = ()
            operation.device.work = None
        if operation.lane.direction == "send":
            self._sends -= 1
            self._bytes -= operation.nbytes
        if self.observer is not None:
            self.observer.released(operation)

    def matched(self, operation: Operation) -> None:
        """Note that the header of a receive is here."""
        if self.observer is not None:
            self.observer.matched(operation)

    def _notify(self) -> None:
        if self._waiters:
            self._released.set()

    def drain(self, limit: float | None) -> None:
        """Wait until every send is complete; raises `CommTimeout` after `limit` seconds."""
        deadline = Deadline(self._runtime.now, limit)
        self.notice_all()
        for operation in self.pending_sends():
            if not self.wait(operation, deadline.remaining()):
                raise CommTimeout(
                    "drain",
                    f"{len(self.pending_sends())} sends are not complete after {limit:g} s, the "
                    f"oldest is {operation.describe()}",
                    "They go on: drain again, or see why the receiver does not receive",
                )
        self.reap()

    def pending(self) -> list[Operation]:
        """Operations that are not settled, oldest first per lane."""
        with self._lock:
            return [o for lane in self._lanes.values() for o in lane if not o.settled]

    @property
    def held_up(self) -> int:
        """How many threads wait for room under the bounds."""
        return self._waiters

    def pending_sends(self) -> list[Operation]:
        """Sends that are not settled, oldest first."""
        sends = [o for o in self.pending() if o.lane.direction == "send"]
        return sorted(sends, key=lambda operation: operation.posted_at)

    def close_after_fork(self, error: CommError) -> None:
        """Settle everything with `error`, and list it no more: after a fork, in the child.

        No event is set, because nobody waits in the child and a thread of the parent may
        have held the event's lock.  Nor is anybody told: observers are the parent's.
        """
        with self._lock:
            self.observer = None
            listed = [operation for lane in self._lanes.values() for operation in lane]
            # Buffers and device events are the parent's to release, so the child keeps all of them.
            self._inherited = [*listed, *self._quarantine.values()]
            for operation in listed:
                if not operation.settled:
                    operation.error = error
                    operation.settled = True
            self._lanes.clear()
            self._quarantine.clear()
            self._sends = self._bytes = self._waiters = 0

    def snapshot(self) -> Snapshot:
        """Everything in flight, as immutable values."""
        now = self._runtime.now()
        with self._lock:
            if self._reaping.background:
                self._reap_all()
            return Snapshot(
                operations=tuple(
                    view(operation, now) for lane in self._lanes.values() for operation in lane
                ),
                sends=self._sends,
                bytes=self._bytes,
                peak_sends=self._peak_sends,
                peak_bytes=self._peak_bytes,
                quarantined=tuple(view(operation, now) for operation in self._quarantine.values()),
            )
