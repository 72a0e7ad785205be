"""One waiter per lane, blocking in the native wait.

On some transports a work is complete only once somebody has waited for it, and only once.  So
each lane has a task that sits in the native wait of its next work (docs/decisions/003): it
notices completion whether or not the program waits, and a caller's limits and interrupts
concern an event of ours, never the native wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from commlayer.errors import CommError
from commlayer.progress.deadline import Deadline
from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Driven, Lane, NativeWork, Step, Wait
from commlayer.progress.runtime import Event, Runtime, Task

logger = logging.getLogger("commlayer")


class Waiter:
    """Drives one lane, on a task that it has while there is something to do.

    A lane that has to be woken keeps its procedure, and after a while gives its task back;
    `resume` starts another one.
    """

    def __init__(self, lane: Lane, runtime: Runtime) -> None:
        self._lane = lane
        self._runtime = runtime
        self._steps = lane.steps()
        self._step: Step = None
        # Guards `_task`, so that a task ends or is found to be there, and never both.
        self._resting = runtime.lock()
        self._task = 0
        """The number of the task that drives the lane; 0 while there is none."""
        self._tasks = 0
        self._thread: Task | None = None
        self._needed = False
        self._over = runtime.event()
        self.ended = False

    def resume(self) -> None:
        """Have a task drive the lane for a while from now on; raises `CommError` if none is to be
        had."""
        self._needed = True
        if self._task:
            return
        with self._resting:
            if self._task or self.ended:
                return
            self._tasks += 1
            number = self._task = self._tasks
            try:
                self._thread = self._runtime.spawn(
                    lambda: self._drive(number), f"commlayer {self._lane.name}"
                )
            except BaseException:
                self._task = 0  # one that began all the same, because of an interrupt, ends
                raise

    def join(self, timeout: float | None) -> bool:
        """Wait until the procedure has ended, and its task; False if one of them goes on."""
        deadline = Deadline(self._runtime.now, timeout)
        if not self._over.wait(deadline.remaining()):
            return False
        thread = self._thread
        if thread is None:
            return True
        thread.join(deadline.remaining())
        return not thread.is_alive()

    def _end(self) -> None:
        self.ended = True
        self._over.set()

    def _drive(self, number: int) -> None:
        with self._resting:
            if self._task != number:
                return
        try:
            with torch.inference_mode():
                self._run()
        except BaseException as failure:
            self._die(failure)

    def _run(self) -> None:
        while not self.ended:
            step = self._step
            if type(step) is Wait and step.seconds is None and self._rest(step.event):
                return
            del step
            self._advance()

    def _rest(self, event: Event) -> bool:
        """Wait for `event`, or let the task go: True once another one will take over."""
        while not event.wait(self._runtime.idle_seconds):
            with self._resting:
                # Who needs the lane sets the event after `resume`: not before the task has ended.
                if not (self._needed or event.is_set()):
                    self._task = 0
                    return True
                self._needed = False
        return False

    def _die(self, failure: BaseException) -> None:
        self._end()
        logger.error("commlayer %s: the lane died", self._lane.name, exc_info=failure)
        self._lane.abandon(failure)

    def _advance(self) -> None:
        """Wait for the current step, then let the lane go on to the next."""
        step, self._step = self._step, None
        error: Exception | None = None
        if type(step) is NativeWork:
            source, work = step
            step = None  # it names the work: while this task waits, `work` alone may
            try:
                source.wait(work)
            except Exception as raised:
                error = raised
            del work  # complete: its memory may go before the lane takes its next step
        elif type(step) is Wait:
            step.event.wait(step.seconds)
        del step  # the lane's next step may block for long
        self._resume(error)

    def _resume(self, error: Exception | None = None) -> None:
        try:
            self._step = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration:
            self._end()
        except BaseException as failure:
            self._die(failure)


class WaiterProgress:
    """One waiter per lane, blocking in the native wait of each work in turn."""

    batches = True
    needs_calls = False

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._waiters: dict[str, Waiter] = {}

    def start(self, lane: Lane) -> None:
        waiter = self._waiters.get(lane.name)
        if waiter is None:
            waiter = self._waiters.setdefault(lane.name, self._waiter(lane))
        waiter.resume()

    def _waiter(self, lane: Lane) -> Waiter:
        return Waiter(lane, self._runtime)

    def wake(self, lane: Lane) -> None:
        try:
            self.start(lane)
        except CommError as error:
            logger.warning("commlayer %s: %s", lane.name, error)

    def notice(self, operation: Operation) -> None:
        lane = operation.driven
        if lane is not None:
            lane.notice(operation.sequence)
            lane.wake()

    def run_until(self, operation: Operation) -> bool:
        self.notice(operation)
        return False

    def block(self, event: Event, timeout: float | None) -> bool:
        return event.wait(timeout)

    def join(self, lanes: Sequence[Driven], deadline: Deadline) -> bool:
        waiters = [self._waiters[lane.name] for lane in lanes if lane.name in self._waiters]
        return all(waiter.join(deadline.remaining()) for waiter in waiters)

    def stop(self) -> None:
        pass
