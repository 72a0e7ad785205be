"""One operation of a process at a time, which is all that the ``ccl`` bindings can do.

The bindings post under one lock of the process, and a thread of theirs waits under it from then on
until the operation is complete (``XPUCCLStubs::runLoop``, ``P2PAsyncWork::isCompleted``).  Until
then nothing else of the process can be posted: two ranks that both send first would wait for ever.
They make a communicator at its first operation, too, and oneCCL's creations in crossed orders
never return.  Here an operation waits, on a thread of its lane, until both its processes have
nothing else to do.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

from commlayer.errors import CommError, ErrorKind

_POLL_SECONDS = 0.001
"""Short beside a message of this path, which goes through the store twice."""


class Process:
    """A process, by its place among all processes, with the turn that one operation has."""

    def __init__(self) -> None:
        self.place = uuid.uuid4().hex
        # Of the two turns that an operation needs, that of the first place is taken first.  So
        # no ring of processes can wait for each other.  Ranks would give no such order: two
        # connections may number the same processes otherwise.
        self.turn = threading.Lock()


_this_process = Process()


class TurnWork:
    """A native work of which the turn ends when it has been waited for, once."""

    def __init__(self, work: Any, turn: threading.Lock) -> None:
        self._work = work
        self._turn = turn

    def wait(self) -> None:
        try:
            self._work.wait()
        finally:
            self._turn.release()


class TurnGroup:
    """A group of two processes whose operations take turns with all others of either process.

    `store` is this group's own, `rank` 0 or 1.  An operation blocks in its post until both
    processes have come to it and to no other.  One to which the peer never comes holds up
    nothing else.  Each work must be waited for, and nothing else be done on that thread before.
    """

    def __init__(self, group: Any, store: Any, rank: int, process: Process = _this_process) -> None:
        self._group = group
        self._store = store
        self._process = process
        self._peers_key = f"place/{1 - rank}"
        self._first: bool | None = None
        self._posted = 0
        self._closed = threading.Event()
        store.set(f"place/{rank}", process.place)

    def send(self, tensors: list[Any], dst: int, tag: int) -> TurnWork:
        return self._post(self._group.send, tensors, dst, tag)

    def recv(self, tensors: list[Any], src: int, tag: int) -> TurnWork:
        return self._post(self._group.recv, tensors, src, tag)

    def shutdown(self) -> None:
        """End whoever waits for a peer to come."""
        self._closed.set()

    def abort(self) -> None:
        """The same: an operation that has its turn cannot be taken back."""
        self._closed.set()

    def _post(self, post: Callable[..., Any], *arguments: Any) -> TurnWork:
        self._take(str(self._posted))
        self._posted += 1
        try:
            return TurnWork(post(*arguments), self._process.turn)
        except BaseException:
            self._process.turn.release()
            raise

    def _take(self, operation: str) -> None:
        """Take the turn of this process, when the other one's is taken or can follow."""
        if self._is_first():
            self._await(f"asked/{operation}")
            self._process.turn.acquire()
            self._store.set(f"granted/{operation}", b"")
        else:
            self._store.set(f"asked/{operation}", b"")
            self._await(f"granted/{operation}")
            self._process.turn.acquire()

    def _is_first(self) -> bool:
        if self._first is None:
            self._first = self._process.place < self._await(self._peers_key).decode()
        return self._first

    def _await(self, key: str) -> bytes:
        while not self._store.check([key]):
            if self._closed.wait(_POLL_SECONDS):
                raise CommError(
                    ErrorKind.CLOSED,
                    "operation on a device lane",
                    "the lane is closed, and the peer has not come to this operation",
                    "Receive everything that is sent before close()",
                )
        value: bytes = self._store.get(key)
        self._store.delete_key(key)  # two keys a message would fill the store
        return value
