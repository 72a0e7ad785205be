"""One operation from post to completion, and where it stands."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from commlayer.errors import CommError, OperationRef
from commlayer.progress.retention import DeviceHold

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from commlayer.progress.lifetime import Fingerprint
    from commlayer.progress.procedure import Lane
    from commlayer.progress.runtime import Event


class LaneKey(NamedTuple):
    """What names a lane: one FIFO of operations that complete in order."""

    channel: str
    peer: int
    direction: str
    """``"send"`` or ``"recv"``."""
    tag: str
    """The caller's tag, or the reserved name of a tag of the library's own."""

    @property
    def name(self) -> tuple[str, str]:
        """Channel and tag: what both ends call the lane."""
        return self.channel, self.tag

    @property
    def numbered(self) -> bool:
        """Whether it is one of many: a lane of a tag that the caller chose, other than 0."""
        return self.tag != "0" and self.tag[-1].isdigit()

    def __str__(self) -> str:
        way = "to" if self.direction == "send" else "from"
        return f"{way} rank {self.peer} (channel {self.channel}, tag {self.tag})"


class DevicePart:
    """The part of an operation that is on a device.

    `buffers` are what it sends, held as long as `hold` says, and `received` the memory that
    is to be recorded on every stream that waits.  `work` is what a stream can wait for in
    place of the host: the posted part of an operation without `host_payload`.  A receive
    into the caller's memory must come `after` a `Point` of his stream.  `done` tells that
    it has ended.
    """

    __slots__ = ("after", "buffers", "done", "hold", "host_payload", "received", "work")

    def __init__(
        self, hold: DeviceHold = DeviceHold.COMPLETION, buffers: Sequence[Any] = ()
    ) -> None:
        self.hold = hold
        self.buffers = buffers
        self.received: Sequence[Any] = ()
        self.work: Any = None
        self.host_payload = False
        self.after: Any = None
        self.done = False


class Operation:
    """The record of one send or receive.

    The ledger settles it once, with a value or an error.  `retained` are the buffers that
    must stay alive until then.  Settling may happen on any thread; reading the flags
    needs no lock.

    `device` is its part on a device, if the communicator has one.  It is complete when all
    its `parts` are: one, or two for a send with payload on both.  `notify` is called when
    it is settled, for waits that look at more than that.

    `step` counts the broadcasts of a channel; -1 for anything else.  `awaited` says
    that a thread blocks for it, or has done so.  `callbacks` run once it is settled, on
    whatever thread that happens.  `holder` is a weak reference to the handle of a receive.
    """

    __slots__ = (
        "__weakref__",
        "awaited",
        "callbacks",
        "connection",
        "device",
        "driven",
        "error",
        "event",
        "fingerprint",
        "holder",
        "kind",
        "lane",
        "nbytes",
        "notify",
        "parts",
        "posted_at",
        "retained",
        "sequence",
        "settled",
        "site",
        "step",
        "value",
    )

    def __init__(
        self, kind: str, lane: LaneKey, nbytes: int, posted_at: float, site: str | None = None
    ) -> None:
        self.kind = kind
        self.lane = lane
        self.nbytes = nbytes
        self.posted_at = posted_at
        self.site = site
        self.connection = ""
        """Name of the connection, where it is not the default one."""
        self.sequence = -1
        self.step = -1
        self.awaited = False
        self.callbacks: list[Callable[[], object]] = []
        self.holder: Callable[[], object] | None = None
        self.retained: Sequence[Any] = ()
        self.fingerprint: Fingerprint | None = None
        self.settled = False
        self.error: CommError | None = None
        self.value: Any = None
        self.event: Event | None = None
        self.parts = 1
        self.notify: Callable[[], None] | None = None
        self.device: DevicePart | None = None
        self.driven: Lane | None = None

    def __str__(self) -> str:
        return str(self.describe())

    def waits_for(self) -> str:
        """Where to look when it does not complete."""
        return f"what rank {self.lane.peer} does"

    def describe(self) -> OperationRef:
        """What errors and reports name it by."""
        parts = [f"connection {self.connection}"] if self.connection else []
        parts += [f"channel {self.lane.channel}", f"tag {self.lane.tag}"]
        if self.sequence >= 0:
            parts.append(f"sequence {self.sequence}")
        if self.nbytes:
            parts.append(f"{self.nbytes} bytes")
        if self.site:
            parts.append(f"posted at {self.site}")
        way = "to" if self.lane.direction == "send" else "from"
        return OperationRef(
            f"{self.kind} {way} rank {self.lane.peer} ({', '.join(parts)})",
            call=self.kind,
            peer=self.lane.peer,
            channel=self.lane.channel,
            tag=self.lane.tag,
            sequence=self.sequence,
            nbytes=self.nbytes,
            connection=self.connection,
        )


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_COMPILER = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "")
_INSIDE = (_PACKAGE, _COMPILER)
"""Folders whose frames are no caller: a compiled function calls through the compiler's."""


def calling_site() -> str:
    """``file:line`` of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
