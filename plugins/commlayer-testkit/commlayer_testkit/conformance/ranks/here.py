"""What a function may call while it runs as a rank."""

from __future__ import annotations

import os
import pickle
from multiprocessing.connection import Connection
from typing import Any

SAID, RETURNED, RAISED = "said", "returned", "raised"

connection: Connection | None = None
"""The connection with whoever started the rank; set by the fork server."""

_store: Any = None


def say(value: Any) -> None:
    """Tell whoever started the rank something: what `Process.hear` returns."""
    assert connection is not None
    connection.send_bytes(pickle.dumps((SAID, value)))


def hear() -> Any:
    """What was said by `Process.say`; waits for it."""
    assert connection is not None
    return pickle.loads(connection.recv_bytes())


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def store() -> Any:
    """A torch store that the ranks of this run share; it outlives every one of them."""
    global _store
    if _store is None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        address, port = os.environ["RANKS_STORE"].rsplit(":", 1)
        client = TCPStore(address, int(port), is_master=False, wait_for_workers=False)
        _store = PrefixStore("test", client)
    return _store


def meet(name: str, of: int | None = None) -> None:
    """Wait until every rank of this run, or `of` ranks, have come to the meeting `name`."""
    arrivals = store()
    if arrivals.add(f"{name}/arrivals", 1) == (of or world_size()):
        arrivals.set(f"{name}/complete", b"")
    arrivals.wait([f"{name}/complete"])
