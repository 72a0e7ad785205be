"""Exceptions that a signal handler raised.

Python runs handlers on the main thread, between any two of its instructions.  What they
raise says nothing of the call that it came out of: a peer is not lost because of it.
"""

from __future__ import annotations

import functools
import signal
import threading
from types import CodeType

from commlayer.errors import CommError, ErrorKind


def came_by_signal(error: BaseException) -> bool:
    """Whether a signal handler raised `error`, here on this thread."""
    if not isinstance(error, Exception):
        return True  # KeyboardInterrupt, SystemExit: no transport raises them
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _code(handler: object) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):
        handler = vars(type(handler)).get("__call__")
    return getattr(handler, "__code__", None)


def interrupted(lane: str, error: BaseException) -> CommError:
    """The error of a lane whose native call `error` has interrupted."""
    failure = CommError(
        ErrorKind.PROTOCOL,
        f"lane {lane}",
        f"interrupted: a signal handler raised {type(error).__name__} while the transport was "
        "called, so that nobody knows what became of the call",
        "This lane has ended, and no other: use another tag or channel, or connect again. A "
        "handler that sets a flag instead of raising interrupts nothing",
    )
    failure.__cause__ = error
    return failure
