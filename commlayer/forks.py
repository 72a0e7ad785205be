"""Locks after a fork.

A forked child has one thread.  A lock that another thread of the parent held at that
moment is held in the child by nobody, and for ever.
"""

from __future__ import annotations

import os
import weakref
from typing import TypeVar

L = TypeVar("L")

_locks: weakref.WeakSet[object] = weakref.WeakSet()


def let_go_in_child(lock: L) -> L:
    """Return `lock`, which in a forked child is free whoever held it in the parent.

    What it guards may have been under change: the child must not go by it.
    """
    _locks.add(lock)
    return lock


def _after_fork() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as `threading` and `logging` do


os.register_at_fork(after_in_child=_after_fork)
