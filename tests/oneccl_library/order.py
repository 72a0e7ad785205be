"""Communicators made one by one, in one order on all ranks, whoever asks for one first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from oneccl_library.library import Group

_POLL_SECONDS = 0.02


class OrderedGroups:
    """Keeps the list of the world's communicators in the store, and makes its own from it.

    The rank that is first to ask for a communicator appends its name.  On every rank one
    thread reads the list and makes those in which the rank takes part.  So all ranks make
    them in the order of the list, and none can wait for one that another has put off.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._asking = store.clone()
        self._reading = store.clone()  # a store client serves one blocked caller at a time
        self._rank = rank
        self._lock = threading.Lock()
        self._made: dict[str, Future[Group]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._make_all, name="oneCCL communicators", daemon=True).start()

    def group(self, name: str) -> Future[Group]:
        """The communicator `name` (which ends with its two ranks, ``low-high``), once made."""
        with self._lock:
            future = self._made.setdefault(name, Future())
            if self._asking.add(f"asked/{name}", 1) == 1:
                self._asking.set(f"list/{self._asking.add('length', 1)}", name)
        return future

    def close(self) -> None:
        self._closed.set()

    def _make_all(self) -> None:
        position = 1
        while not self._closed.is_set():
            key = f"list/{position}"
            if not self._reading.check([key]):
                time.sleep(_POLL_SECONDS)
                continue
            self._make(self._reading.get(key).decode())
            position += 1

    def _make(self, name: str) -> None:
        ranks = [int(rank) for rank in name.rpartition("/")[2].split("-")]
        if self._rank not in ranks:
            return
        with self._lock:
            future = self._made.setdefault(name, Future())
        try:
            made = Group(PrefixStore(name, self._reading), ranks.index(self._rank))
            future.set_result(made.connect())
        except Exception as error:
            future.set_exception(error)
