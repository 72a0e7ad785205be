"""Polls the transport for all lanes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from commlayer.errors import CommError
from commlayer.progress.deadline import Deadline
from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Driven, NativeWork, Procedure, Step, Wait
from commlayer.progress.runtime import Event, Runtime, Task
from commlayer.wire.modes import outside_modes

logger = logging.getLogger("commlayer")


class PollingProgress:
    """Polls the current work of every lane, in the caller's waits and, if allowed, in between.

    `background` runs a task that polls while work is outstanding; without it
    (transports that only their own thread may call) operations move inside
    calls on the communicator.
    """

    IDLE_SLEEP = 0.0005
    """Seconds between two rounds of polling in which nothing moved, while somebody waits."""
    LONGEST_SLEEP = 0.01
    """The background task doubles its sleep up to this many seconds while nothing moves."""

    batches = False

    def __init__(self, runtime: Runtime, *, background: bool) -> None:
        self._runtime = runtime
        self._background = background
        self.needs_calls = not background
        self._active: dict[str, tuple[Driven, Procedure, Step, Deadline | None]] = {}
        self._begun: set[str] = set()
        # Guards the table of lanes and who polls them; no lane is moved under it.
        self._lock = runtime.lock()
        self._advancing = False
        self._started = runtime.event()
        self._owner = runtime.current()
        self._stopped = False
        self._failure: BaseException | None = None
        self._task: Task | None = None

    def start(self, lane: Driven) -> None:
        if lane.name in self._begun:
            return
        if self._background:
            self._start_task()
        with self._lock:
            if lane.name in self._begun:
                return
            self._begun.add(lane.name)
            if self._failure is None:
                self._active[lane.name] = (lane, lane.steps(), None, None)
        if self._failure is not None:
            lane.abandon(self._failure)
            return
        if not self._background:
            self.advance()
        self.poll_soon()

    def _start_task(self) -> None:
        if self._task is None:
            with self._lock:
                if self._task is None:
                    self._task = self._runtime.spawn(self._run, "commlayer polling")

    def wake(self, lane: Driven) -> None:
        try:
            self.start(lane)
        except CommError as error:
            logger.warning("commlayer %s: %s", lane.name, error)

    def notice(self, operation: Operation) -> None:
        self.advance()

    def run_until(self, operation: Operation) -> bool:
        return False

    def poll_soon(self) -> None:
        """Have the background task poll now, and often from now on."""
        self._started.set()

    def _run(self) -> None:
        pause = self.IDLE_SLEEP
        try:
            with torch.inference_mode():
                while True:
                    self._started.clear()
                    if self._stopped:
                        return
                    if self.advance() or self._started.wait(pause if self._active else None):
                        pause = self.IDLE_SLEEP
                    else:
                        pause = min(2 * pause, self.LONGEST_SLEEP)
        except BaseException as failure:
            logger.exception("commlayer: polling died")
            self._abandon_all(failure)

    def _abandon_all(self, failure: BaseException) -> None:
        with self._lock:
            self._failure = failure
            lanes = [lane for lane, *_ in self._active.values()]
            self._active.clear()
        for lane in lanes:
            lane.abandon(failure)

    @outside_modes
    def advance(self) -> bool:
        """Poll every lane once; True if any moved.

        Returns at once if another task is doing so, and off the owner's thread
        of a transport that only its owner may call.
        """
        if not self._background and self._runtime.current() != self._owner:
            return False
        with self._lock:
            if self._advancing:
                return False
            self._advancing = True
            active = list(self._active.values())
        try:
            moved = False
            for lane, steps, step, within in active:
                moved |= self._advance_lane(lane, steps, step, within)
            return moved
        finally:
            self._advancing = False

    def _advance_lane(
        self, lane: Driven, steps: Procedure, step: Step, within: Deadline | None
    ) -> bool:
        moved = False
        current: Step = step
        ended = False
        while not ended:
            error: Exception | None = None
            try:
                if not self._ready(current, within):
                    break
            except Exception as raised:
                error = raised
            moved = True
            try:
                current = next(steps) if error is None else steps.throw(error)
                within = None
                if type(current) is Wait and current.seconds is not None:
                    within = Deadline(self._runtime.now, current.seconds)
            except StopIteration:
                ended = True
            except BaseException as failure:
                ended = True
                logger.exception("commlayer %s: the lane died", lane.name)
                lane.abandon(failure)
                if not isinstance(failure, Exception):
                    raise
        if moved:
            with self._lock:
                if ended:
                    self._active.pop(lane.name, None)
                else:
                    self._active[lane.name] = (lane, steps, current, within)
        return moved

    @staticmethod
    def _ready(step: Step, within: Deadline | None) -> bool:
        if type(step) is Wait:
            return step.event.is_set() or (within is not None and within.expired())
        if type(step) is NativeWork:
            if not step.source.poll(step.work):
                return False
            step.source.wait(step.work)
        return True

    def block(self, event: Event, timeout: float | None) -> bool:
        deadline = Deadline(self._runtime.now, timeout)
        while True:
            moved = self.advance()
            if event.is_set():
                return True
            if deadline.expired():
                return False
            if not moved:
                self._runtime.sleep(self.IDLE_SLEEP)

    def join(self, lanes: Sequence[Driven], deadline: Deadline) -> bool:
        names = {lane.name for lane in lanes}
        while names & self._active.keys():
            if not self.advance():
                if deadline.expired():
                    return False
                self._runtime.sleep(self.IDLE_SLEEP)
        return True

    def stop(self) -> None:
        self._stopped = True
        self._started.set()
        if self._task is not None:
            self._task.join(1.0)
