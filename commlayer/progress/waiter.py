"""One waiter per lane, blocking in the native wait.

On some transports a work is complete only once somebody has waited for it, and only once.  So
each lane has a task that sits in the native wait of its next work (docs/decisions/003): it
notices completion whether or not the program waits, and a caller's limits and interrupts
concern an event of ours, never the native wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from commlayer.progress.deadline import Deadline
from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Driven, Lane, NativeWork, Step, Wait
from commlayer.progress.runtime import Event, Runtime, Task

logger = logging.getLogger("commlayer")


class Waiter:
    """Drives one lane, on a task of its own."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._steps = lane.steps()
        self._step: Step = None
        self.ended = False

    def run(self) -> None:
        """Drive the lane to its end."""
        try:
            with torch.inference_mode():
                self._run()
        except BaseException as failure:
            self._die(failure)

    def _run(self) -> None:
        while not self.ended:
            self._advance()

    def _die(self, failure: BaseException) -> None:
        self.ended = True
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
        del step
        self._resume(error)

    def _resume(self, error: Exception | None = None) -> None:
        try:
            self._step = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration:
            self.ended = True
        except BaseException as failure:
            self._die(failure)


class WaiterProgress:
    """One waiter per lane, blocking in the native wait of each work in turn."""

    batches = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks: dict[str, Task] = {}

    def start(self, lane: Lane) -> None:
        self._spawn(lane, Waiter(lane).run)

    def _spawn(self, lane: Lane, run: Callable[[], None]) -> None:
        self._tasks[lane.name] = self._runtime.spawn(run, f"commlayer {lane.name}")

    def wake(self, lane: Lane) -> None:
        pass

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
        tasks = [self._tasks[lane.name] for lane in lanes if lane.name in self._tasks]
        for task in tasks:
            task.join(deadline.remaining())
        return not any(task.is_alive() for task in tasks)

    def stop(self) -> None:
        pass
