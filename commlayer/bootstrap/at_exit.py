"""What happens to open communicators when the process ends or forks."""

from __future__ import annotations

import atexit

# Executors have Python join their workers at the end of the main thread.  What is registered
# later is called earlier: theirs has to be registered before `install` is called.
import concurrent.futures.thread  # noqa: F401
import ctypes
import logging
import multiprocessing.util
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from commlayer.bootstrap import patience
from commlayer.errors import CommError, ErrorKind, in_a_line
from commlayer.progress.deadline import Deadline

if TYPE_CHECKING:
    from commlayer.session import Session

logger = logging.getLogger("commlayer")

_SILENT_SECONDS = 0.5
"""Delivering what was sent before the end takes so long without a word."""

_sessions: dict[int, tuple[Session, Any]] = {}
_installed_in = 0


def watch(session: Session, natives: Any) -> None:
    """Close `session` when the process ends; `natives` are its native objects.

    When the main thread has ended, or a forked ``multiprocessing`` child ends, an open
    session is closed within its ``close_timeout``: other threads that wait in it get
    CLOSED, and Python, which joins them first of all, can end.  After ``fork`` the child's
    session is closed without a native call.
    """
    install()
    _sessions[id(session)] = (session, natives)


def unwatch(session: Session) -> None:
    """Forget a session that has ended with nothing left inside its transport."""
    _sessions.pop(id(session), None)


def install() -> None:
    """See to the end of this process.  A second call does nothing."""
    global _installed_in
    if _installed_in == os.getpid():
        return
    if not _installed_in:
        _at_end_of_main_thread()
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
    _installed_in = os.getpid()


def _at_end_of_main_thread() -> None:
    """Have `_close_all` called before Python joins other threads, as executors do.

    The function is not public.  Without it a thread that waits in the library keeps the
    process until its peer sends or closes.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        try:
            register(_close_all)
        except RuntimeError:
            pass  # the main thread has ended already: `_at_exit` is left


def _close_all() -> None:
    patience.leave()
    interrupted = False
    for session, _ in list(_sessions.values()):
        interrupted |= not _close(session, 0.0 if interrupted else None)


def _close(session: Session, timeout: float | None) -> bool:
    """Close `session`; False where a signal handler, as that of Ctrl-C, put an end to waiting."""
    deadline = Deadline(
        session.connection.runtime.now,
        session.config.close_timeout if timeout is None else timeout,
    )
    try:
        _say_what_is_left(session, deadline)
        session.close(deadline.remaining(), _failure())
    except CommError as error:
        logger.warning("commlayer at exit: %s", error)
    except Exception:
        logger.exception("commlayer at exit")
    except BaseException as interrupt:
        # Nobody is left to take it.  Peers are still told, which waits for nothing.
        logger.warning("commlayer at exit: given up (%s)", type(interrupt).__name__)
        if timeout is None:
            _close(session, 0.0)
        return False
    return True


def _say_what_is_left(session: Session, deadline: Deadline) -> None:
    """Say what the process goes on for, once that takes longer than a moment."""
    connection = session.connection
    if connection.closed is not None:
        return
    left = deadline.remaining() or 0.0
    silent = Deadline(connection.runtime.now, min(_SILENT_SECONDS, left))
    for operation in connection.ledger.pending_sends():
        if not connection.ledger.wait(operation, silent.remaining()):
            sends = len(connection.ledger.pending_sends())
            logger.warning(
                "commlayer at exit: delivering %d sends, for at most %.3g s", sends, left
            )
            return


def _failure() -> str:
    """The exception that ends the process, in words; empty if none does."""
    # A ``multiprocessing`` child closes while it is under way; a program after it was printed.
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # where somebody types, it may be long over
        error = getattr(sys, "last_value", None)
    return in_a_line(error) if isinstance(error, Exception) else ""


def _at_exit() -> None:
    _close_all()
    if _sessions or patience.left_behind():
        _park_native_threads()
        for _, natives in _sessions.values():
            _leak(natives)
        _sessions.clear()


def _park_native_threads() -> None:
    """Let a thread that returns from native code during finalization sleep instead of aborting.

    Before Python 3.14 such a thread is ended by unwinding its C++ frames, which
    calls ``std::terminate`` and aborts the process, whatever its exit code was
    to be.  A terminate handler that never returns keeps thread and exit code.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
    except (OSError, AttributeError):
        logger.warning("commlayer at exit: native operations are pending, the process may abort")
        return
    set_terminate.argtypes = [ctypes.c_void_p]
    set_terminate.restype = ctypes.c_void_p
    set_terminate(pause)


def _leak(natives: Any) -> None:
    """Keep objects from ever being destroyed: their destructors would wait for lost threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(natives))


def _after_fork() -> None:
    error = CommError(
        ErrorKind.CLOSED,
        "communicator",
        f"this process was forked (pid {os.getpid()}); the parent keeps the connection",
        "Connect anew in the child, or use the spawn start method",
    )
    for session, natives in _sessions.values():
        session.connection.close_after_fork(error)
        _leak((session, natives))
    _sessions.clear()
