"""One `connect` at a time for each rank of a world, whichever threads call it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

from commlayer.backend import World
from commlayer.bootstrap.stores import describe
from commlayer.errors import CommTimeout
from commlayer.forks import let_go_in_child

_locks: WeakValueDictionary[object, Any] = WeakValueDictionary()
_guard = let_go_in_child(threading.Lock())
"""Guards `_locks`, whose entries come and go with the calls that hold them."""


@contextmanager
def turn(world: World, store: object) -> Iterator[None]:
    """Wait for other calls of this process that connect as the same rank under the same name.

    Two at once would be two processes of one rank to the others.  One after another they
    pair in their order.  `store` is the one that the caller gave, if it did.
    """
    key = (world.name, world.rank, describe(world.store), id(store))
    with _guard:
        lock = _locks.setdefault(key, let_go_in_child(threading.Lock()))
    if not _acquire(lock, world):
        raise CommTimeout(
            "connect",
            f"another thread of rank {world.rank} has been connecting under the same name for "
            f"{world.connect_timeout:g} s",
            "Give each connection that is made at the same time another `name`",
        )
    try:
        yield
    finally:
        lock.release()


def _acquire(lock: Any, world: World) -> bool:
    return bool(lock.acquire(timeout=min(world.remaining(), threading.TIMEOUT_MAX)))
