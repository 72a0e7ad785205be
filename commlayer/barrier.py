"""A barrier: no rank leaves before every rank has come."""

from __future__ import annotations

from commlayer.handle import Handle
from commlayer.lanes.connection import Connection
from commlayer.lanes.posting import Posting
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.wire.frame import Kind
from commlayer.wire.tags import BARRIER


class Barrier:
    """The barriers of one channel, one after another.

    In round k each rank tells the rank 2**k after it and hears from the one 2**k before it
    (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988): after
    log2(size) rounds everybody has heard of everybody.
    """

    def __init__(self, posting: Posting, connection: Connection) -> None:
        self._posting = posting
        self._now = connection.runtime.now
        self._rank = connection.rank
        self._size = connection.size
        self._step = 1
        self._awaited: Handle | None = None
        """What a wait whose limit expired was waiting for: the next one goes on with it."""

    def wait(self, timeout: float | None) -> None:
        """Wait for all ranks; a wait that ends by `CommTimeout` is taken up by the next one."""
        deadline = Deadline(self._now, checked_timeout(timeout))
        while self._step < self._size:
            if self._awaited is None:
                after = (self._rank + self._step) % self._size
                before = (self._rank - self._step) % self._size
                self._posting.send("barrier", Kind.OBJECT, None, after, BARRIER)
                self._awaited = self._posting.receive("barrier", Kind.OBJECT, before, BARRIER)
            self._awaited.wait(deadline.remaining())
            self._awaited = None
            self._step *= 2
        self._step = 1
