"""Lanes that are moved by whoever waits for them.

A waiter's task that notices completion has to wake the thread that waits for it, which costs
more than a small message.  Here the waiting thread enters the native wait itself.  One thread
at a time has a lane, so that each work is waited for once; others queue behind it, and when
it lets go the first of them is woken.  A task in the background moves lanes that nobody waits
for, and must stay out of the way of those that somebody is about to wait for: hence ticks.
"""

from __future__ import annotations

from collections import deque

from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Lane, Wait
from commlayer.progress.runtime import Runtime
from commlayer.progress.waiter import Waiter, WaiterProgress
from commlayer.wire.modes import outside_modes

_TICK = 0.002
"""Seconds after which a lane that is wanted and that nobody moves is moved in the background: a
caller that posts and then waits has come by then."""
_LONGEST_TICK = 0.05
"""Seconds between looks at a lane that callers move: each finds it taken, and costs a wake-up."""
_QUIET_TICKS = 8
"""Idle checks, each after twice the last pause (2 to 512 ms), before the task sleeps until it is
woken."""


class _SharedWaiter(Waiter):
    """Moves one lane on the thread that waits for it, or on a task of its own if nobody does.

    One thread has the lane at a time.  Others that want it follow: when it is
    let go, the first of them is woken to take it.
    """

    def __init__(self, lane: Lane, runtime: Runtime) -> None:
        super().__init__(lane, runtime)
        # Guards who has the lane and who comes next; nothing else is called under it.
        self._lock = runtime.lock()
        self._signal = runtime.event()
        self._followers: deque[Operation] = deque()
        self._taken = False
        self._idle = False
        self._urgent = False
        self._moves = 0

    def wake(self) -> None:
        """Wake the task if it waits for the lane to become wanted."""
        if self._idle:
            self._signal.set()

    def move_soon(self) -> None:
        """Have the task move the lane now."""
        self._urgent = True
        self._signal.set()
        self.resume()

    @outside_modes
    def move(self, operation: Operation) -> bool:
        """Move the lane until `operation` is settled; False if it is to be waited for instead."""
        while not operation.settled:
            if not self._take(operation):
                return False
            try:
                parked = self._move_until(operation)
            except BaseException as interrupt:
                self._die(interrupt)
                raise
            finally:
                self._let_go()
            if parked or self.ended:
                self._signal.set()
                self.resume()
                return operation.settled
        return True

    def _take(self, follower: Operation | None = None) -> bool:
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            if follower is not None:
                self._followers.append(follower)
            return False

    def _let_go(self) -> None:
        with self._lock:
            self._taken = False
            while self._followers and self._followers[0].settled:
                self._followers.popleft()
            follower = self._followers.popleft() if self._followers else None
        if follower is None:
            return
        if follower.event is not None:
            follower.event.set()
        else:
            self.move_soon()

    def _move_until(self, operation: Operation) -> bool:
        """True where the lane waits for an event that is not set."""
        while not operation.settled and not self.ended:
            step = self._step
            if type(step) is not Wait:
                del step  # `_advance` takes it over, and lets go of the work before it rests
                self._moves += 1
                self._advance()
            elif step.seconds is not None or step.event.is_set():
                self._step = None
                self._resume()
            else:
                return True
        return False

    def _run(self) -> None:
        pause, quiet = _TICK, 0
        self._idle = False
        self._move_if_free()
        while not self.ended:
            step = self._step
            if type(step) is Wait:
                if step.seconds is not None:
                    step.event.wait(step.seconds)
                elif self._rest(step.event):
                    return
                if not self._move_if_free(step):
                    self._signal.wait(_TICK)
                continue
            del step  # not kept while this task pauses: somebody else may take the lane
            if not (self._lane.wanted or self._urgent):
                self._move_if_free()
                self._idle = quiet > 1
                if not (self._idle and self._lane.wanted):
                    if quiet <= _QUIET_TICKS:
                        self._signal.wait(_TICK * 2**quiet)
                    elif self._rest(self._signal):
                        return
                self._idle = False
                self._signal.clear()
                quiet += 1
                continue
            quiet, moves = 0, self._moves
            if not self._urgent:
                self._signal.wait(pause)
            self._signal.clear()
            if not self._urgent and self._moves != moves:
                pause = _TICK
                continue
            self._urgent = False
            moved = self._move_if_free(wanted=True)
            pause = _TICK if moved else min(2 * pause, _LONGEST_TICK)

    def _move_if_free(self, woken: object = None, *, wanted: bool = False) -> bool:
        """Let the lane go on to what it waits for next; False if somebody else has it.

        `woken` is a step that is over.  With `wanted` its native works are waited
        for, too, as long as the lane is wanted.
        """
        if not self._take():
            return False
        try:
            if woken is not None and self._step is woken:
                self._step = None
                del woken  # this frame must not keep what the step named
                self._resume()
            while not self.ended:
                if self._step is None or (
                    wanted and type(self._step) is not Wait and self._lane.wanted
                ):
                    self._advance()
                else:
                    break
        finally:
            self._let_go()
        return True


class DirectProgress(WaiterProgress):
    """As `WaiterProgress`, and an untimed wait enters the native wait itself.

    That saves the hop to another thread and back.  The thread that waits cannot
    be interrupted inside the native wait (an interrupt that arrives there ends
    the lane), and does not learn of a lost peer before the transport does.  What
    nobody waits for without a limit is moved in the background, a few
    milliseconds later than by `WaiterProgress`.
    """

    def _waiter(self, lane: Lane) -> Waiter:
        return _SharedWaiter(lane, self._runtime)

    def wake(self, lane: Lane) -> None:
        waiter = self._shared(lane)
        if waiter is not None:
            waiter.wake()
        super().wake(lane)

    def notice(self, operation: Operation) -> None:
        super().notice(operation)
        waiter = self._shared(operation.driven)
        if waiter is not None:
            waiter.move_soon()

    def run_until(self, operation: Operation) -> bool:
        waiter = self._shared(operation.driven)
        if waiter is None:
            return False
        assert operation.driven is not None
        operation.driven.notice(operation.sequence)
        return waiter.move(operation)

    def _shared(self, lane: Lane | None) -> _SharedWaiter | None:
        waiter = None if lane is None else self._waiters.get(lane.name)
        return waiter if isinstance(waiter, _SharedWaiter) else None
