"""A report when the process gets a signal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from commlayer.errors import CommError, ErrorKind


class SignalHook:
    """Calls `reported` in the handler of a signal, then the handler that was there before.

    `reported` may only set a flag.  Python runs handlers on the main thread, between
    two of its instructions: a main thread that is inside native code runs it when
    it returns.
    """

    def __init__(self, name: str, reported: Callable[[], None]) -> None:
        self._number = _number(name)
        self._reported = reported
        if threading.current_thread() is not threading.main_thread():
            raise _refused(name, "connect() was called on another thread than the main one")
        self._before: Any = signal.getsignal(self._number)
        self._handler = self._handle  # one bound method, to be recognised again
        try:
            signal.signal(self._number, self._handler)
        except OSError as error:
            raise _refused(name, str(error)) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._reported()
        if callable(self._before):
            self._before(number, frame)

    def remove(self) -> None:
        """Put back the handler that was there before, unless another has come since."""
        self._reported = _nothing
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(self._number) is self._handler
        ):
            signal.signal(self._number, signal.SIG_DFL if self._before is None else self._before)


def _nothing() -> None:
    pass


def _number(name: str) -> int:
    try:
        return signal.Signals[name].value
    except KeyError:
        raise _refused(name, "there is no such signal here") from None


def _refused(name: str, cause: str) -> CommError:
    return CommError(
        ErrorKind.CONFIG,
        f"report_signal = {name!r}",
        cause,
        "Name a signal such as SIGUSR1 and connect on the main thread, or leave it empty",
    )
