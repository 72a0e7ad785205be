"""The runtime of `commlayer.progress.runtime`, under greenlets and virtual time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from commlayer_testkit.sim.world import Task, World


class TaskEvent:
    """`threading.Event` for tasks of a world."""

    __slots__ = ("_flag", "_world", "name")

    def __init__(self, world: World, name: str = "event") -> None:
        self._world = world
        self._flag = False
        self.name = name

    def set(self) -> None:
        self._world.point()
        if not self._flag:
            self._flag = True
            self._world.version += 1

    def clear(self) -> None:
        self._world.point()
        if self._flag:
            self._flag = False
            self._world.version += 1

    def is_set(self) -> bool:
        return self._flag

    def wait(self, timeout: float | None = None) -> bool:
        return self._world.block(self.is_set, "waits for", self, timeout)

    def describe(self) -> str:
        return self.name

    def waits_for(self) -> list[object]:
        return []


class TaskLock:
    """`threading.Lock` for tasks of a world: not reentrant, no fairness."""

    __slots__ = ("_owner", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._owner: object = None

    def _free(self) -> bool:
        return self._owner is None

    def acquire(self) -> bool:
        world = self._world
        if world.running is not None:
            if not world.closing:
                world.block(self._free, "waits for", self)
            self._owner = world.running
        return True

    def release(self) -> None:
        self._owner = None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def describe(self) -> str:
        return "a lock" if self._owner is None else f"the lock of {self._owner.name}"  # type: ignore[attr-defined]

    def waits_for(self) -> list[object]:
        return [] if self._owner is None else [self._owner]


class SimRuntime:
    """Tasks, locks, events and time of one rank.  Spawned tasks are daemons."""

    idle_seconds = None

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank

    def spawn(self, function: Callable[[], None], name: str) -> Task:
        return self._world.spawn(
            function, f"rank {self._rank} {name}", rank=self._rank, daemon=True
        )

    def lock(self) -> TaskLock:
        return TaskLock(self._world)

    def event(self) -> TaskEvent:
        return TaskEvent(self._world)

    def now(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.block(_never, "sleeps", None, seconds)

    def current(self) -> object:
        return self._world.running


def _never() -> bool:
    return False
