"""A world: tasks and actors, one choice source, and a clock that jumps.

Tasks run ordinary blocking code, each in a greenlet.  Actors take the steps that
no rank's code takes: a lane moves a message, a stream runs its next kernel.  One
loop picks who goes next.  A task gives way before every visible operation
(posting, waiting, polling, locks, events, sleeping) and nowhere else: races
between two bytecodes of one rank are not explored.

Ranks share the world's own objects and nothing else; a scenario whose ranks talk
through Python variables is outside what the explorer's pruning assumes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from commlayer_testkit.sim.choices import Choices
from commlayer_testkit.sim.failure import Failure, FailureKind

if TYPE_CHECKING:
    from commlayer_testkit.sim.memory import Buffer
    from commlayer_testkit.sim.operation import Operation
    from commlayer_testkit.sim.profiles import Profile
    from commlayer_testkit.sim.rank import Rank
    from commlayer_testkit.sim.transport import Network

HORIZON = 1e7
"""Seconds of virtual time after which nothing that is still awaited will come."""
IDLE_TICKS = 5_000
"""Jumps of the clock without any other change that count as no progress."""
LAST_TICKS = 20
"""The same once every task that is no daemon has finished."""
EVERYTHING = -1


def program_bit(rank: int) -> int:
    """What the code of `rank` works on."""
    return 1 << (3 * rank)


def memory_bit(rank: int) -> int:
    """The memory of `rank` that operations in flight read, and the works it may drop."""
    return 1 << (3 * rank + 1)


class StepBound(Exception):
    """The run took more steps than its world allows."""


class Actor:
    """Whatever has at most one next step.

    `writes` and `reads` are bit sets of what every such step touches; what one
    step touches beyond them it tells by `World.touch`.  Two steps commute when
    neither writes what the other touches.
    """

    __slots__ = ("deadline", "index", "name", "reads", "world", "writes")

    def __init__(self, world: World, name: str, writes: int = EVERYTHING, reads: int = 0) -> None:
        self.world = world
        self.name = name
        self.writes = writes
        self.reads = reads
        self.deadline: float | None = None
        self.index = world.add(self)

    def ready(self) -> bool:
        """Whether the step can be taken now.  Pure."""
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


_guards: set[torch.inference_mode] = set()
"""Those of tasks that wait.  One that is dropped with its task, because nobody has closed the
world, would switch inference mode on in whichever thread collects it."""


class Task(Actor):
    """A function that runs in a greenlet of its own, on behalf of a rank."""

    __slots__ = ("_parked", "daemon", "finished", "label", "on", "rank", "reason", "run",
                 "spun", "spun_at", "spun_for", "stream", "until", "yielded")  # fmt: skip

    def __init__(
        self, world: World, function: Callable[[], object], name: str, rank: int, daemon: bool
    ) -> None:
        super().__init__(world, name, writes=program_bit(rank) if rank >= 0 else EVERYTHING)
        self.rank = rank
        self.daemon = daemon
        self.finished = False
        self.until: Callable[[], bool] | None = None
        self.reason = ""
        self.on: object = None
        self.yielded = False
        self.spun: object = None
        self.spun_at = -1
        self.spun_for = 1e-3
        self.label = ""
        self.stream: Any = None
        self._parked: Any = None
        self.run = greenlet(self._run(function), world.hub)

    def _run(self, function: Callable[[], object]) -> Callable[[], None]:
        def body() -> None:
            try:
                function()
            except GreenletExit:
                pass
            except BaseException as error:
                if not self.world.closing:
                    self.world.task_raised(self, error)
            finally:
                self.finished = True

        return body

    def ready(self) -> bool:
        until = self.until
        if until is None or until():
            return True
        return self.deadline is not None and self.deadline <= self.world.now

    def step(self) -> None:
        self.world.running = self
        self.resume(self.run.switch)
        self.world.running = None

    def resume(self, switch: Callable[[], object]) -> None:
        """Run to the next point.  Inference mode, which is the thread's, becomes the task's."""
        if self._parked is not None:
            self._parked.__exit__(None, None, None)
            _guards.discard(self._parked)
            self._parked = None
        switched = self.world.switched
        if switched is None:
            switch()
        else:
            switched(self.rank)
            switch()
            switched(-1)
        if torch.is_inference_mode_enabled():
            self._parked = torch.inference_mode(False)
            self._parked.__enter__()
            _guards.add(self._parked)

    def describe(self) -> str:
        return self.name

    def waits_for(self) -> list[object]:
        return [] if self.on is None else [self.on]

    def join(self, timeout: float | None = None) -> None:
        """As `threading.Thread.join`."""
        self.world.block(lambda: self.finished, "joins", self, timeout)

    def is_alive(self) -> bool:
        return not self.finished


class World:
    """One execution.

    `choices` decides every interleaving and every free behaviour of the profile.
    `explain` records posting and writing lines (slow); `log` collects what
    happened, for traces.  `early_ticks` lets the clock jump that many times
    although something could still run: a slow transfer against a timeout.
    """

    def __init__(
        self,
        choices: Choices,
        profile: Profile,
        *,
        max_steps: int = 50_000,
        early_ticks: int = 0,
        explain: bool = False,
        log: list[tuple[int, float, str, str, str]] | None = None,
    ) -> None:
        self.choices = choices
        self.profile = profile
        self.max_steps = max_steps
        self.early_ticks = early_ticks
        self.explain = explain
        self.log = log
        self.hub = getcurrent()
        self.now = 0.0
        self.steps = 0
        self.version = 0
        self.actors: list[Actor] = []
        self.created = 0
        self.running: Task | None = None
        self.failure: Failure | None = None
        self.closing = False
        self.ranks: list[Rank] = []
        self.lost: list[str] = []
        self.writes_seen: dict[int, str] = {}
        self.sources: dict[int, list[Operation]] = {}
        self.stored: dict[str, bytes] = {}
        """What the ranks have put into their store."""
        self.touched_writes = self.touched_reads = 0
        self._bits = 0
        self._issued = 0
        self._checks: list[Callable[[], object]] = []
        self._networks: dict[str, Network] = {}
        self._at_close: list[Callable[[], object]] = []
        self.switched: Callable[[int], object] | None = None
        """Called with a rank before one of its tasks runs, and with -1 after."""
        self._clock: _Clock | None = None
        if early_ticks:
            self._clock = _Clock(self)
            self.actors.remove(self._clock)

    # -- making ---------------------------------------------------------------

    def add(self, actor: Actor) -> int:
        """Let `actor` take part; returns its number."""
        self.actors.append(actor)
        self.created += 1
        return self.created - 1

    def bit(self) -> int:
        """A fresh bit for `Actor.writes` and `Actor.reads`; of three, two are a rank's."""
        self._bits += 1
        return 1 << (3 * self._bits - 1)

    def spawn(
        self,
        function: Callable[[], object],
        name: str,
        *,
        rank: int | None = None,
        daemon: bool = False,
    ) -> Task:
        """Start a task, of the rank of the calling task unless `rank` says otherwise."""
        if rank is None:
            rank = self.running.rank if self.running else -1
        return Task(self, function, name, rank, daemon)

    def start(self, size: int, body: Callable[[Rank], object]) -> list[Rank]:
        """Make ranks 0 to ``size - 1``; each runs ``body(rank)`` as its main task."""
        from commlayer_testkit.sim.rank import Rank

        for _ in range(size):
            self.ranks.append(Rank(self, len(self.ranks)))
        for rank in self.ranks[-size:]:
            self.spawn(_bound(body, rank), rank.name, rank=rank.index)
        return self.ranks

    def network(self, profile: Profile | None = None) -> Network:
        """The transport of `profile` (default: the world's own) that connects all ranks."""
        profile = profile or self.profile
        network = self._networks.get(profile.name)
        if network is None:
            from commlayer_testkit.sim.transport import Network

            network = self._networks[profile.name] = Network(self, profile)
        return network

    def at_end(self, check: Callable[[], object]) -> None:
        """Call `check` at quiescence; it raises `AssertionError` or calls `fail`."""
        self._checks.append(check)

    def at_close(self, call: Callable[[], object]) -> None:
        """Call `call` when the world is closed, however it ended."""
        self._at_close.append(call)

    # -- what tasks call ------------------------------------------------------

    def issue(self) -> int:
        """A number that grows in program order of everything that is issued."""
        self._issued += 1
        return self._issued

    def touch(self, writes: int = 0, reads: int = 0) -> None:
        """The running step touches more than its actor always does."""
        self.touched_writes |= writes
        self.touched_reads |= reads

    def point(self) -> None:
        """Give way before a visible operation."""
        if self.running is not None and not self.closing:
            self.hub.switch()

    def block(
        self, until: Callable[[], bool], reason: str, on: object, timeout: float | None = None
    ) -> bool:
        """Block the calling task until `until()` holds; False when `timeout` seconds passed first.

        `on` is what the wait-for graph shows; `until` must be pure.
        """
        if self.closing:
            raise GreenletExit
        task = self.running
        if task is None:
            raise RuntimeError(f"blocked outside a task: {reason}")
        task.until, task.reason, task.on = until, reason, on
        task.deadline = None if timeout is None else self.now + timeout
        self.hub.switch()
        task.until = task.on = task.deadline = None
        if until():
            return True
        self.touch(reads=EVERYTHING)
        return False

    def spin(self, on: object) -> None:
        """A query of `on` was answered "not yet".

        The task then gives way, and a second such answer with nothing changed in
        between parks it until something changes or a little time has passed.
        """
        task = self.running
        if task is None:
            return
        self.touch(reads=EVERYTHING)
        if task.spun is on and task.spun_at == self.version:
            before = self.version
            self.block(lambda: self.version != before, "polls", on, task.spun_for)
            task.spun_for = 1e-3 if self.version != before else task.spun_for * 2
        else:
            task.yielded = True
        task.spun, task.spun_at = on, self.version

    def choose(self, options: int) -> int:
        """A free behaviour of the simulated transport; 0 is the ordinary one."""
        return self.choices.value(options)

    def fail(
        self, kind: FailureKind, what: str, lines: tuple[str, ...] = (), *, unwind: bool = True
    ) -> None:
        """Record the first failure; the run ends.  A calling task does not return."""
        if self.failure is None and not self.closing:
            self.failure = Failure(kind, what, (), lines)
            if unwind and self.running is not None and getcurrent() is self.running.run:
                self.hub.switch()

    def writer_of(self, buffer: Buffer) -> str:
        """Who last wrote into the storage of `buffer`, where `explain` recorded it."""
        return self.writes_seen.get(buffer.storage_address, "")

    def task_raised(self, task: Task, error: BaseException) -> None:
        """Note that a task of a rank ended by `error`: the schedule fails."""
        where = error.__traceback__
        lines = []
        while where is not None:
            code = where.tb_frame.f_code
            lines.append(f"at {code.co_filename.rpartition('/')[2]}:{where.tb_lineno}")
            where = where.tb_next
        if isinstance(error, AssertionError):
            what = f"{task.name}: {error}"
        else:
            what = f"{task.name} raised {type(error).__name__}: {error}"
        self.fail(FailureKind.ERROR, what, tuple(lines[-3:]), unwind=False)

    def note(self, who: str, what: str, detail: str = "") -> None:
        """Add a line to the log, if one is kept."""
        if self.log is not None:
            self.log.append((self.steps, self.now, who, what, detail))

    # -- the loop -------------------------------------------------------------

    def run(self) -> None:
        """Run to quiescence, failure, or a bound.

        Raises `StepBound`, or `Pruned` from the choices.  `failure` says the rest.
        """
        choices, last = self.choices, None
        idle, idle_version = 0, -1
        while self.failure is None:
            enabled = [actor for actor in self.actors if actor.ready()]
            if not enabled:
                idle = idle + 1 if idle_version == self.version else 0
                idle_version = self.version
                if idle > (IDLE_TICKS if self._busy() else LAST_TICKS) or not self._tick():
                    self._quiescent()
                    return
                choices.ticked()
                continue
            continues = False
            if last is not None and len(enabled) > 1 and last in enabled:
                if isinstance(last, Task) and last.yielded:
                    enabled.remove(last)
                    enabled.append(last)
                else:
                    continues = True
                    if enabled[0] is not last:
                        enabled.remove(last)
                        enabled.insert(0, last)
            if self._clock is not None and self._clock.ready():
                enabled.append(self._clock)
            actor = enabled[choices.schedule(enabled, continues)]
            if isinstance(actor, Task):
                actor.yielded = False
            self.steps += 1
            if self.steps > self.max_steps:
                raise StepBound
            if self.log is not None:
                self.note(actor.name, "step", actor.reason if isinstance(actor, Task) else "")
            if choices.follows:
                self._followed_step(actor)
            else:
                actor.step()
            last = actor
            if isinstance(actor, Task) and actor.finished:
                self.actors.remove(actor)
                self.version += 1
                last = None

    def _followed_step(self, actor: Actor) -> None:
        writes, reads = actor.writes, actor.reads
        self.touched_writes = self.touched_reads = 0
        actor.step()
        if isinstance(actor, Task) and actor.rank >= 0:
            sources = self.sources.get(actor.rank, [])
            disturbed = [operation for operation in sources if operation.disturbed()]
            if disturbed:
                writes |= memory_bit(actor.rank)
                for operation in disturbed:
                    if operation.read:
                        sources.remove(operation)
        self.choices.followed(writes | self.touched_writes, reads | self.touched_reads)

    def _tick(self) -> bool:
        """Jump to the next deadline; False when there is none within the horizon."""
        pending = [a.deadline for a in self.actors if a.deadline is not None]
        later = [deadline for deadline in pending if deadline > self.now]
        if not later or min(later) > HORIZON:
            return False
        self.now = min(later)
        return True

    def _busy(self) -> list[Task]:
        return [a for a in self.actors if isinstance(a, Task) and not a.daemon]

    def _quiescent(self) -> None:
        stuck = self._busy()
        if stuck:
            from commlayer_testkit.sim.report import deadlock

            self.failure = deadlock(self, stuck)
            return
        if self.lost:
            self.fail(FailureKind.LOST_MESSAGE, self.lost[0], tuple(self.lost[1:]))
            return
        for check in self._checks:
            try:
                check()
            except AssertionError as error:
                self.fail(FailureKind.ERROR, f"at the end: {error}")

    def close(self) -> None:
        """End all tasks.  Their blocking calls raise `GreenletExit`, in `finally` blocks too."""
        self.closing = True
        logger = logging.getLogger("commlayer")
        logger.disabled, was_disabled = True, logger.disabled
        self._end_tasks()
        logger.disabled = was_disabled
        for network in self._networks.values():
            network.close()
        for rank in self.ranks:
            rank.close()
        self.actors.clear()
        self.ranks.clear()
        self._checks.clear()
        for call in self._at_close:
            call()
        self._at_close.clear()
        self.switched = None

    def _end_tasks(self) -> None:
        for actor in self.actors:
            if isinstance(actor, Task):
                for _ in range(100):
                    if actor.run.dead:
                        break
                    actor.resume(actor.run.throw)
                actor.until = actor.on = None


class _Clock(Actor):
    """Time that passes although something could run."""

    __slots__ = ()

    def __init__(self, world: World) -> None:
        super().__init__(world, "clock")

    def ready(self) -> bool:
        world = self.world
        if world.early_ticks <= 0:
            return False
        now = world.now
        return any(a.deadline is not None and a.deadline > now for a in world.actors)

    def step(self) -> None:
        self.world.early_ticks -= 1
        self.world._tick()


def _bound(body: Callable[[Rank], object], rank: Rank) -> Callable[[], object]:
    return lambda: body(rank)


def site() -> str:
    """The innermost line outside the library, or in a scenario: ``file:line``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if (
            not module.startswith(
                ("commlayer.", "commlayer_testkit.", "torch", "greenlet", "weakref")
            )
            or ".scenarios" in module
        ):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"
