"""Stopping a process for a while, as a debugger does."""

from __future__ import annotations

from pathlib import Path


def stopped(pid: int) -> bool:
    """Whether every thread of a process is stopped by a signal.

    SIGSTOP takes effect on each thread when the kernel next deals with it: on a busy
    machine that is some milliseconds later, in which the process goes on.
    """
    return all(_state(thread) in "Tt" for thread in Path(f"/proc/{pid}/task").iterdir())


def _state(thread: Path) -> str:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"  # it has ended meanwhile
