"""Calls that may block in native code, made so that the caller keeps its limit.

Python runs signal handlers on the main thread, between its own instructions.  A
thread that waits inside a store or a transport answers no signal and keeps no limit
but the callee's.  So such calls are made on a thread of their own, and the caller
waits for their result in Python.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.runtime import start_thread

T = TypeVar("T")

LOOK_SECONDS = 0.2
"""How often a caller that waits looks at what else may have happened."""
_JOIN_SECONDS = 1.0

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_leaving = False


def leave() -> None:
    """Have every thread that connects give up: the main thread has ended, and Python joins them."""
    global _leaving
    _leaving = True


def check_staying() -> None:
    """Raise `CommError` (CLOSED) once the process is ending."""
    if _leaving:
        raise CommError(
            ErrorKind.CLOSED,
            "connect",
            "the main thread has ended, and so does this process",
            "Join the thread that connects before the main thread ends",
        )


class Late(Exception):
    """The call has not returned within the limit.  It goes on, and nobody has its result."""


class Helper:
    """A thread that makes the calls of one caller, one after another, until `close`."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stuck = False
        """Whether a call was given up before it returned."""

    def call(
        self, function: Callable[[], T], limit: float, look: Callable[[], None] | None = None
    ) -> T:
        """The result of `function`, or what it raises; raises `Late` after `limit` seconds.

        `look` is called every `LOOK_SECONDS` meanwhile, and may raise.
        """
        if self._thread is None:
            thread = start_thread(partial(_serve, self._calls), "commlayer start-up")
            _threads.add(thread)
            self._thread = thread
        call = _Call(function)
        self._stuck = True
        self._calls.put(call)
        deadline = time.monotonic() + limit
        while True:
            left = max(0.0, deadline - time.monotonic())
            if call.done.acquire(timeout=min(left, LOOK_SECONDS)):
                self._stuck = False
                return call.result()  # type: ignore[no-any-return]
            if left <= LOOK_SECONDS:
                raise Late
            if look is not None:
                look()

    def close(self) -> None:
        """End the thread.  One that is stuck in native code is left behind, and ends after it."""
        self._calls.put(None)
        if self._thread is not None and not self._stuck:
            self._thread.join(_JOIN_SECONDS)


class _Call:
    """One call and its outcome.

    `done` is a bare lock that the helper releases: an interrupted wait for one, unlike one
    for a `threading.Event`, leaves nothing taken.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def make(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.done.release()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        call.make()
        del call  # its result may hold a connection, which the caller alone decides about


def left_behind() -> bool:
    """Whether a thread may still be inside native code that somebody has given up."""
    return any(thread.is_alive() for thread in list(_threads))
