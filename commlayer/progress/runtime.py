"""The few primitives that progress is written against.

The simulator supplies the same primitives under greenlets and virtual time, so
that the code that runs in production is the code that is explored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

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

    def spawn(self, function: Callable[[], None], name: str) -> Task: ...

    def lock(self) -> AbstractContextManager[object]: ...

    def event(self) -> Event: ...

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def current(self) -> object:
        """The identity of the calling task."""
        ...


class ThreadRuntime:
    """The real runtime: daemon threads and the monotonic clock."""

    def spawn(self, function: Callable[[], None], name: str) -> Task:
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def lock(self) -> AbstractContextManager[object]:
        return let_go_in_child(threading.Lock())

    def event(self) -> Event:
        return threading.Event()

    # The functions themselves: an operation asks for the time on its way, and a method in
    # between would cost as much as the answer.
    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    current = staticmethod(threading.get_ident)
