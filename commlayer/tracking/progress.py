"""What drives operations to completion when nobody waits.

Each lane is a procedure (a generator) that yields what it waits for: a native
work, or an event.  Two drivers run procedures: `WaiterProgress` gives each
lane a waiter that blocks in the native wait, once per work and in order;
`PollingProgress` asks the transport's poll for all lanes.  Which one is sound
follows from the declared facts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, Protocol

import torch

from commlayer.backend import Endpoint
from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import Poll, PostMayBlock, Progress, Semantics, Threads, WaitBlocks
from commlayer.tracking.runtime import Event, Runtime, Task

logger = logging.getLogger("commlayer")


class NativeWork(NamedTuple):
    """A posted native operation that a lane waits for."""

    endpoint: Endpoint
    work: Any


Procedure = Generator["NativeWork | Event", None, None]


class Driven(Protocol):
    """A lane, as its driver sees it."""

    @property
    def name(self) -> str: ...

    def steps(self) -> Procedure:
        """The lane's procedure.  An error of a native work is thrown into it."""
        ...

    def abandon(self, error: BaseException) -> None:
        """Called when the procedure itself died: every pending operation must fail."""
        ...


class ProgressEngine(Protocol):
    """Runs the procedures of lanes."""

    def start(self, lane: Driven) -> None:
        """Begin to drive `lane`.  Called once per lane."""
        ...

    def block(self, event: Event, timeout: float | None) -> bool:
        """Wait until `event` is set, driving lanes where the caller has to; False on timeout."""
        ...

    def poke(self) -> None:
        """Move what the caller's own calls have to move; never blocks."""
        ...

    def join(self, lanes: list[Driven], deadline: float) -> bool:
        """Wait until the procedures of `lanes` have ended; False if one runs at `deadline`."""
        ...

    def stop(self) -> None:
        """Say that no lane will be started any more."""
        ...


class WaiterProgress:
    """One waiter per lane, blocking in the native wait of each work in turn."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tasks: dict[str, Task] = {}

    def start(self, lane: Driven) -> None:
        self._tasks[lane.name] = self._runtime.spawn(lambda: _drive(lane), f"commlayer {lane.name}")

    def block(self, event: Event, timeout: float | None) -> bool:
        return event.wait(timeout)

    def poke(self) -> None:
        pass

    def join(self, lanes: list[Driven], deadline: float) -> bool:
        tasks = [self._tasks[lane.name] for lane in lanes if lane.name in self._tasks]
        for task in tasks:
            task.join(max(0.0, deadline - self._runtime.now()))
        return not any(task.is_alive() for task in tasks)

    def stop(self) -> None:
        pass


def _drive(lane: Driven) -> None:
    with torch.inference_mode():
        try:
            steps = lane.steps()
            step: NativeWork | Event | None = next(steps)
            while True:
                error: Exception | None = None
                if isinstance(step, NativeWork):
                    endpoint, work = step
                    step = None
                    try:
                        endpoint.wait(work)
                    except Exception as raised:
                        error = raised
                    del work
                elif step is not None:
                    step.wait()
                step = next(steps) if error is None else steps.throw(error)
        except StopIteration:
            pass
        except BaseException as failure:
            logger.exception("commlayer %s: the lane died", lane.name)
            lane.abandon(failure)


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

    def __init__(self, runtime: Runtime, *, background: bool) -> None:
        self._runtime = runtime
        self._background = background
        self._active: dict[str, tuple[Driven, Procedure, NativeWork | Event]] = {}
        self._lock = runtime.lock()
        self._advancing = False
        self._started = runtime.event()
        self._ready_now = runtime.event()
        self._ready_now.set()
        self._owner = runtime.current()
        self._stopped = False
        self._failure: BaseException | None = None
        self._task: Task | None = None

    def start(self, lane: Driven) -> None:
        if self._failure is not None:
            lane.abandon(self._failure)
            return
        with self._lock:
            self._active[lane.name] = (lane, lane.steps(), self._ready_now)
        if not self._background:
            self.advance()
        elif self._task is None:
            self._task = self._runtime.spawn(self._run, "commlayer polling")
        self.wake()

    def wake(self) -> None:
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
            lanes = [lane for lane, _, _ in self._active.values()]
            self._active.clear()
        for lane in lanes:
            lane.abandon(failure)

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
            for lane, steps, step in active:
                moved |= self._advance_lane(lane, steps, step)
            return moved
        finally:
            self._advancing = False

    def _advance_lane(self, lane: Driven, steps: Procedure, step: NativeWork | Event) -> bool:
        moved = False
        current: NativeWork | Event | None = step
        while current is not None:
            error: Exception | None = None
            try:
                if not self._ready(current):
                    break
            except Exception as raised:
                error = raised
            moved = True
            current = self._resume(lane, steps, error)
        if moved:
            with self._lock:
                if current is None:
                    self._active.pop(lane.name, None)
                else:
                    self._active[lane.name] = (lane, steps, current)
        return moved

    @staticmethod
    def _ready(step: NativeWork | Event) -> bool:
        if not isinstance(step, NativeWork):
            return step.is_set()
        if not step.endpoint.poll(step.work):
            return False
        step.endpoint.wait(step.work)
        return True

    @staticmethod
    def _resume(
        lane: Driven, steps: Procedure, error: Exception | None
    ) -> NativeWork | Event | None:
        try:
            return next(steps) if error is None else steps.throw(error)
        except StopIteration:
            return None
        except BaseException as failure:
            logger.exception("commlayer %s: the lane died", lane.name)
            lane.abandon(failure)
            if not isinstance(failure, Exception):
                raise
            return None

    def block(self, event: Event, timeout: float | None) -> bool:
        deadline = None if timeout is None else self._runtime.now() + timeout
        while True:
            moved = self.advance()
            if event.is_set():
                return True
            if deadline is not None and self._runtime.now() >= deadline:
                return False
            if not moved:
                self._runtime.sleep(self.IDLE_SLEEP)

    def poke(self) -> None:
        self.advance()

    def join(self, lanes: list[Driven], deadline: float) -> bool:
        names = {lane.name for lane in lanes}
        while names & self._active.keys():
            if not self.advance():
                if self._runtime.now() >= deadline:
                    return False
                self._runtime.sleep(self.IDLE_SLEEP)
        return True

    def stop(self) -> None:
        self._stopped = True
        self._started.set()
        if self._task is not None:
            self._task.join(1.0)


_CHOICES: dict[str, Callable[[Runtime, Semantics], ProgressEngine]] = {
    "waiter": lambda runtime, _: WaiterProgress(runtime),
    "polling": lambda runtime, semantics: PollingProgress(
        runtime, background=semantics.threads is not Threads.FUNNELED
    ),
}


def choose_progress(
    preference: str, semantics: Semantics, runtime: Runtime, backend: str
) -> ProgressEngine:
    """The driver that the facts allow; `preference` is ``auto`` or the name of one.

    Raises `CommError` (CONFIG) naming the fact that rules out the preferred
    driver, or (UNSUPPORTED) when the facts rule out both.
    """
    obstacles = {"waiter": _waiter_obstacle(semantics), "polling": _polling_obstacle(semantics)}
    if preference != "auto":
        if obstacles[preference]:
            raise CommError(
                ErrorKind.CONFIG,
                f"progress {preference!r} on backend {backend!r}",
                f"unsound: {obstacles[preference]}",
                "Leave progress at 'auto'",
            )
        return _CHOICES[preference](runtime, semantics)
    for name, obstacle in obstacles.items():
        if not obstacle:
            return _CHOICES[name](runtime, semantics)
    raise CommError(
        ErrorKind.UNSUPPORTED,
        f"progress on backend {backend!r}",
        f"no way to notice completion is sound: {obstacles['waiter']}; {obstacles['polling']}",
        "Declare (and prove) a stronger fact in the plugin",
    )


def _waiter_obstacle(semantics: Semantics) -> str:
    if semantics.p2p.wait_blocks is not WaitBlocks.HOST:
        return "waiters need wait_blocks = HOST"
    if semantics.threads is not Threads.MULTIPLE:
        return f"waiters need threads = MULTIPLE, declared is {semantics.threads.name}"
    if semantics.progress is not Progress.AUTONOMOUS:
        return f"waiters need progress = AUTONOMOUS, declared is {semantics.progress.name}"
    return ""


def _polling_obstacle(semantics: Semantics) -> str:
    if semantics.p2p.poll is not Poll.EXACT:
        return f"polling needs poll = EXACT, declared is {semantics.p2p.poll.name}"
    if semantics.p2p.post_may_block is not PostMayBlock.NEVER:
        return (
            f"polling needs post_may_block = NEVER, declared is {semantics.p2p.post_may_block.name}"
        )
    return ""
