"""One other rank: its lanes, its loss, and messages to its library.

A failure concerns one peer.  Everything that must fail together therefore hangs on the
`Peer`: when the transport reports an error on one lane, all lanes with that rank fail, and
none with another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from commlayer.errors import CommError, ErrorKind, peer_lost
from commlayer.lanes.context import LaneContext, Prefetch
from commlayer.lanes.receiving import RecvLane
from commlayer.lanes.sending import SendLane
from commlayer.progress.operation import LaneKey, Operation
from commlayer.wire.control import Control, LaneBroken, LaneName, encode_control
from commlayer.wire.frame import Kind
from commlayer.wire.message import plain
from commlayer.wire.tags import CONTROL_LANE, TagMap

logger = logging.getLogger("commlayer")

MOST_LANES = 8192
"""Lanes with one peer in one direction.  An idle one keeps about 20 KB until the end."""


class Whereabouts(NamedTuple):
    """Which process a rank is."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Peer:
    """The lanes with one other rank, and why nothing more can be posted to it, if so.

    `closed` is set when this rank closes, `error` when the peer has closed or is lost.
    `parted` is set once nothing more is to be learnt from the peer: it has answered the
    goodbye, has said its own, or is lost.  `since` is when the connection was made, or when
    `error` was set, in seconds since the epoch.  All methods may be called from any thread.
    """

    def __init__(
        self,
        rank: int,
        whereabouts: Whereabouts,
        prefetch: Prefetch,
        context: LaneContext,
        tags: TagMap,
    ) -> None:
        self.rank = rank
        self.whereabouts = whereabouts
        self.since = time.time()
        self.prefetch = prefetch
        self.sends: dict[LaneName, SendLane] = {}
        self.receives: dict[LaneName, RecvLane] = {}
        self.closed: CommError | None = None
        self.error: CommError | None = None
        self.lost = False
        self.parted = context.runtime.event()
        # Guards the two dicts, `closed` and `lost`, so that a lane is either made before its
        # peer is lost or closed, and ended with the others, or refused.  Taken before the
        # locks of lanes, never after them.
        self.lock = context.runtime.lock()
        self._context = context
        self._tags = tags

    @property
    def refusal(self) -> CommError | None:
        """Why nothing more can be posted; ``None`` while both ends are open."""
        return self.closed or self.error

    def lanes(self) -> list[SendLane | RecvLane]:
        """All lanes with the peer."""
        return [*self.sends.values(), *self.receives.values()]

    def open_send_lane(self, name: LaneName) -> SendLane:
        """The lane for messages to the peer; raises if either end is closed or lost."""
        error = self.closed or self.error
        if error is not None:
            raise error.again()
        lane = self.sends.get(name)
        if lane is None:
            self._check_room(len(self.sends), name)
            lane = self.send_lane(name)
        return lane

    def prepare_send(self, name: LaneName) -> None:
        """Have the lane to an open peer driven, so that a post on it fails of nothing here."""
        if self.refusal is None:
            self._context.progress.start(self.send_lane(name))

    def open_recv_lane(self, name: LaneName) -> RecvLane:
        """The lane for messages from the peer; raises if this end is closed.

        A lane that exists outlives the peer: what it has taken in can still be claimed.
        """
        if self.closed is not None:
            raise self.closed.again()
        lane = self.receives.get(name)
        if lane is None:
            self._check_room(len(self.receives), name)
            lane = self.recv_lane(name, only_if_open=True)
        return lane

    def _check_room(self, lanes: int, name: LaneName) -> None:
        if lanes >= MOST_LANES:
            raise CommError(
                ErrorKind.FULL,
                f"channel {name[0]}, tag {name[1]}",
                f"there are {lanes} lanes in this direction with rank {self.rank} already, one for "
                "each channel and tag that was used",
                "Use tags again: as many as there are messages in flight suffice",
            )

    def send_lane(self, name: LaneName) -> SendLane:
        """The lane of that name to the peer, whatever has become of either end."""
        with self.lock:
            lane = self.sends.get(name)
            if lane is None:
                key = LaneKey(name[0], self.rank, "send", name[1])
                lane = SendLane(self._context, self, key, self._tags.native(*name))
                if self.lost and self.error is not None:
                    lane.refuse(self.error)
                self.sends[name] = lane
        return lane

    def recv_lane(self, name: LaneName, *, only_if_open: bool = False) -> RecvLane:
        """The lane of that name from the peer; with `only_if_open`, raises what closed either."""
        with self.lock:
            lane = self.receives.get(name)
            if lane is not None:
                return lane
            error = self.closed or self.error
            if only_if_open and error is not None:
                raise error.again()
            key = LaneKey(name[0], self.rank, "recv", name[1])
            lane = RecvLane(self._context, self, key, self._tags.native(*name))
            self.receives[name] = lane
        return lane

    def transport_failed(self, cause: Exception) -> CommError:
        """A native operation failed: every lane with the peer fails.  Returns the error.

        Where it is this rank's own device that failed, what is on the device fails instead.
        """
        device = self._context.device
        here = None if device is None else device.failed_here(cause)
        if here is not None:
            return here
        error = self.error
        if error is None:
            why, said = "the transport has failed", _first_line(cause)
            error = peer_lost(self.rank, str(self.whereabouts), why, said)
            error.__cause__ = cause
        self.mark_lost(error)
        return (self.error or error).again()

    def mark_lost(self, error: CommError) -> None:
        """Fail every operation with the peer, pending and to come."""
        with self.lock:
            error = self._give_up(error)
            if self.lost:
                return
            self.lost = True
            lanes = self.lanes()
        device = self._context.device
        for lane in lanes:
            if isinstance(lane, SendLane):
                lane.fail(error, stuck=True)
            elif device is None:
                lane.discard(error)
            else:
                lane.fail(error)
        if device is not None:
            device.fail(self.rank, error)
        self.part()

    def close(self, error: CommError) -> None:
        """Refuse every later post with `error`: the peer has closed."""
        with self.lock:
            self._give_up(error)

    def _give_up(self, error: CommError) -> CommError:
        """Set `error` unless one is set; returns the one that is.  Called under the lock."""
        if self.error is None:
            self.error = error
            self.since = time.time()
        return self.error

    def part(self) -> None:
        """Note that nothing more is to be learnt from the peer."""
        self.parted.set()
        if self._context.device is not None:
            self._context.device.notify()

    def lane_broken(self, key: LaneKey, error: CommError) -> None:
        """Tell the sender that nothing it sends on this lane will be received."""
        if key.name == CONTROL_LANE:
            self.mark_lost(error)
        else:
            taken = self.receives[key.name].taken
            self.post_control(LaneBroken(key.name, taken, str(error)))

    def post_control(
        self, message: Control, left: Callable[[], None] | None = None
    ) -> Operation | None:
        """Post `message` to the peer's library; ``None`` where that is not possible.

        Never blocks.  `left` is called once it has left, or never will.
        """
        lane = self.send_lane(CONTROL_LANE)
        operation = self.internal_operation("control message", lane.key)
        operation.notify = left
        try:
            lane.post(operation, plain(Kind.CONTROL, encode_control(message)))
            return operation
        except CommError as error:
            logger.debug(
                "commlayer: no %s to rank %d: %s", type(message).__name__, self.rank, error
            )
            return None

    def internal_operation(self, kind: str, key: LaneKey) -> Operation:
        """An operation of the library's own, outside ledger and bounds."""
        return Operation(kind, key, 0, self._context.runtime.now())


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
