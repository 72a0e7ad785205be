"""The few primitives that progress is written against.

The simulator supplies the same primitives under greenlets and virtual time, so
that the code that runs in production is the code that is explored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import Empty, SimpleQueue
from typing import Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.forks import let_go_in_child


class Event(Protocol):
    """A flag that tasks wait for; the interface of `threading.Event`."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Task(Protocol):
    """A running function."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Runtime(Protocol):
    """Tasks, locks, events and a monotonic clock in seconds."""

    @property
    def idle_seconds(self) -> float | None:
        """A task without anything to do may end after so long; ``None`` where tasks are free."""
        ...

    def spawn(self, function: Callable[[], None], name: str) -> Task:
        """Start a task; raises `CommError` (FULL) where there can be no more of them."""
        ...

    def lock(self) -> AbstractContextManager[object]: ...

    def event(self) -> Event: ...

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def current(self) -> object:
        """The identity of the calling task."""
        ...


def start_thread(function: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread; raises `CommError` (FULL) where the system has no more of them."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise CommError(
            ErrorKind.FULL,
            f"start of thread {name!r}",
            f"the system gives this process no more threads ({error}; it has "
            f"{threading.active_count()} of Python's)",
            "Raise the limit (ulimit -u, or pids.max of the container) and call again, or use "
            "fewer tags and channels at a time",
        ) from error
    return thread


class Flag:
    """As `threading.Event`, and fit for threads that a signal handler may interrupt.

    `threading.Event` runs Python code while it holds a lock; an exception that a handler
    raises there leaves the lock taken for ever.  This one holds none.
    """

    __slots__ = ("_set", "_waiters")

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[SimpleQueue[None]] = []

    def set(self) -> None:
        self._set = True
        if self._waiters:
            try:
                self._wake_all()
            except BaseException:
                self._wake_all()  # an interrupt: waking twice does no harm
                raise

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        waiter: SimpleQueue[None] = SimpleQueue()
        self._waiters.append(waiter)
        try:
            # Once more: it may have been set before this waiter was seen.
            if not self._set:
                waiter.get(True, timeout)
            return True
        except Empty:
            return self._set
        finally:
            self._waiters.remove(waiter)

    def _wake_all(self) -> None:
        for waiter in tuple(self._waiters):
            waiter.put(None)


class ThreadRuntime:
    """The real runtime: daemon threads and the monotonic clock."""

    idle_seconds = 0.2

    def spawn(self, function: Callable[[], None], name: str) -> Task:
        return start_thread(function, name)

    def lock(self) -> AbstractContextManager[object]:
        return let_go_in_child(threading.Lock())

    def event(self) -> Event:
        return Flag()

    # The functions themselves: an operation asks for the time on its way, and a method in
    # between would cost as much as the answer.
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    current = staticmethod(threading.get_ident)
