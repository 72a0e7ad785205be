"""What happens to open communicators when the process ends or forks."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing.util
import os
from typing import TYPE_CHECKING, Any

from commlayer.bootstrap.patience import left_behind
from commlayer.errors import CommError, ErrorKind

if TYPE_CHECKING:
    from commlayer.session import Session

logger = logging.getLogger("commlayer")

_sessions: dict[int, tuple[Session, Any]] = {}
_installed_in = 0


def watch(session: Session, natives: Any) -> None:
    """Close `session` when the process ends; `natives` are its native objects.

    At the end of the interpreter, or of a forked ``multiprocessing`` child, an
    open session is closed within its ``close_timeout``.  After ``fork`` the
    child's session is closed without a native call.
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
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_after_fork)
    multiprocessing.util.Finalize(None, _at_exit, exitpriority=100)
    _installed_in = os.getpid()


def _at_exit() -> None:
    for session, _ in list(_sessions.values()):
        _close(session)
    if _sessions or left_behind():
        _park_native_threads()
        for _, natives in _sessions.values():
            _leak(natives)
        _sessions.clear()


def _close(session: Session) -> None:
    try:
        session.close()
    except CommError as error:
        logger.warning("commlayer at exit: %s", error)
    except Exception:
        logger.exception("commlayer at exit")


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
