"""All lanes of this rank with all its peers, and what their libraries tell each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from commlayer.backend import Endpoint
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind, connection_with
from commlayer.lanes.closing import Parting
from commlayer.lanes.context import Ahead, LaneContext
from commlayer.lanes.receiving import RecvLane
from commlayer.lanes.sending import SendLane
from commlayer.liveness.meeting import Link
from commlayer.liveness.monitor import Monitor
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.runtime import Event, Runtime
from commlayer.wire.control import (
    Answer,
    Ask,
    Control,
    LaneBroken,
    LaneName,
    decode_control,
    encode_control,
)
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.message import plain
from commlayer.wire.reader import Incoming
from commlayer.wire.tags import CONTROL_LANE, TagMap
from commlayer.wire.tensors import Limits

logger = logging.getLogger("commlayer")


class Peer:
    """One other rank: its lanes, and why nothing more can be posted to it, if so.

    `parted` is set once nothing more is to be learnt from it: it has answered
    the goodbye, has said its own, or is lost.
    """

    def __init__(self, rank: int, runtime: Runtime) -> None:
        self.rank = rank
        self.sends: dict[LaneName, SendLane] = {}
        self.receives: dict[LaneName, RecvLane] = {}
        self.error: CommError | None = None
        self.lost = False
        self.parted = runtime.event()

    def lanes(self) -> list[SendLane | RecvLane]:
        return [*self.sends.values(), *self.receives.values()]


class Connection:
    """Makes lanes on demand, spreads the loss of a peer, and speaks with the peers' libraries.

    `lock` guards the lanes of all peers.  `closed` is why nothing can be posted any
    more, or ``None`` while open.  Methods may be called from any thread, progress
    drivers included.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        endpoint: Endpoint,
        tags: TagMap,
        runtime: Runtime,
        ledger: Ledger,
        progress: ProgressEngine,
        limits: Limits,
        inline_bytes: int,
        unclaimed: int,
        serial: bool,
        ahead: Ahead,
        peers_ahead: dict[int, Ahead],
        device: DeviceSide | None = None,
        links: Mapping[int, Link] | None = None,
        peer_timeout: float = 0.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.runtime = runtime
        self.ledger = ledger
        self.progress = progress
        self.tags = tags
        self.device = device
        self._endpoint = endpoint
        self.lock = runtime.lock()
        self.closed: CommError | None = None
        self._closing = False
        self._context = LaneContext(
            runtime=runtime,
            ledger=ledger,
            progress=progress,
            limits=limits,
            inline_bytes=inline_bytes,
            unclaimed=unclaimed,
            serial=serial,
            ahead=ahead,
            peers_ahead=peers_ahead,
            peer_failed=self._peer_failed,
            lane_broken=self._lane_broken,
            device=device,
        )
        self.peers = {r: Peer(r, runtime) for r in range(size) if r != rank}
        self._parting = Parting(self)
        self._monitor = Monitor(links or {}, peer_timeout, runtime, self)
        self.inquired: Callable[[int, Ask | Answer], None] | None = None
        """Told of what a peer asks or answers, on the driver of its control lane; it may raise
        `CommError` for what cannot be trusted."""

    def open(self) -> None:
        """Begin to listen to every peer."""
        for peer in self.peers.values():
            lane = self.recv_lane_of(peer, CONTROL_LANE)
            lane.claim(_ControlClaim(self, peer, lane))
        self._monitor.start()

    def block(self, event: Event, timeout: float | None) -> bool:
        """Wait until `event` is set, driving what the caller has to; False on timeout."""
        if self.device is None:
            return self.progress.block(event, timeout)
        return self.device.block(event, timeout)

    def parted_from(self, peer: Peer) -> None:
        """Note that nothing more is to be learnt from `peer`."""
        peer.parted.set()
        if self.device is not None:
            self.device.notify()

    def advance(self) -> None:
        """Move what only the user's own calls may move.  Called in every one of them."""
        if self.device is not None:
            self.device.advance()

    def send_lane(self, channel: str, peer: int, tag: str) -> SendLane:
        """The lane for messages to `peer`; raises if this rank or the peer is closed or lost."""
        target = self.peers[peer]
        error = self.closed or target.error
        if error is not None:
            raise error.again()
        return self.send_lane_of(target, (channel, tag))

    def recv_lane(self, channel: str, peer: int, tag: str) -> RecvLane:
        """The lane for messages from `peer`.  A lane that exists outlives the peer: what it
        has taken in can still be claimed."""
        source = self.peers[peer]
        name = (channel, tag)
        if self.closed is not None:
            raise self.closed.again()
        return source.receives.get(name) or self.recv_lane_of(source, name, only_if_open=True)

    def send_lane_of(self, peer: Peer, name: LaneName) -> SendLane:
        """The lane of that name to `peer`, whatever has become of either."""
        lane = peer.sends.get(name)
        if lane is None:
            with self.lock:
                lane = peer.sends.get(name)
                if lane is None:
                    key = LaneKey(name[0], peer.rank, "send", name[1])
                    lane = SendLane(self._context, self._endpoint, key, self.tags.native(*name))
                    if peer.lost and peer.error is not None:
                        lane.refuse(peer.error)
                    peer.sends[name] = lane
        return lane

    def recv_lane_of(self, peer: Peer, name: LaneName, *, only_if_open: bool = False) -> RecvLane:
        """The lane of that name from `peer`; with `only_if_open`, raises what has closed either."""
        with self.lock:
            lane = peer.receives.get(name)
            if lane is not None:
                return lane
            error = self.closed or peer.error
            if only_if_open and error is not None:
                raise error.again()
            key = LaneKey(name[0], peer.rank, "recv", name[1])
            lane = RecvLane(self._context, self._endpoint, key, self.tags.native(*name))
            peer.receives[name] = lane
        lane.start()
        return lane

    def _peer_failed(self, rank: int, cause: Exception) -> CommError:
        """A native operation with `rank` failed: every lane with it fails, and no other."""
        peer = self.peers[rank]
        error = peer.error
        if error is None:
            error = CommError(
                ErrorKind.PEER_LOST,
                connection_with(rank),
                f"the transport reports: {_first_line(cause)}",
                f"Rank {rank} has died or cannot be reached; restart the group",
            )
            error.__cause__ = cause
            peer.error = error
        self._lose(peer, error)
        return error.again()

    def _lose(self, peer: Peer, error: CommError) -> None:
        with self.lock:
            if peer.lost:
                return
            peer.lost = True
            lanes = peer.lanes()
        for lane in lanes:
            if isinstance(lane, SendLane):
                lane.fail(error, stuck=True)
            elif self.device is None:
                lane.sink(error)
            else:
                lane.fail(error)
        if self.device is not None:
            self.device.fail(peer.rank, error)
        self.parted_from(peer)

    def _lane_broken(self, key: LaneKey, error: CommError) -> None:
        """Tell the sender that nothing it sends on this lane will be received."""
        peer = self.peers[key.peer]
        name = key.name
        if name == CONTROL_LANE:
            self.lose(peer.rank, error)
        else:
            self.post_control(peer, LaneBroken(name, peer.receives[name].taken, str(error)))

    def lose(self, rank: int, error: CommError) -> None:
        """Fail every operation with `rank`, pending and to come, and no other."""
        peer = self.peers[rank]
        peer.error = peer.error or error
        self._lose(peer, error)

    def abandon(self, error: CommError) -> None:
        """Fail everything, with every peer: a task that watches over it has died."""
        for peer in self.peers.values():
            self.lose(peer.rank, error)

    def tell(self, rank: int, message: Ask | Answer, left: Callable[[], None]) -> bool:
        """Post an inquiry to `rank`, or an answer to its own; False where that is not possible.

        Never blocks.  `left` is called once it has left, or never will, on any task.
        """
        peer = self.peers[rank]
        if self.closed is not None or peer.error is not None:
            return False
        operation = self.post_control(peer, message, left)
        if operation is not None:
            self.progress.attend(operation)
        return operation is not None

    def post_control(
        self, peer: Peer, message: Control, left: Callable[[], None] | None = None
    ) -> Operation | None:
        """Post `message` to `peer`'s library; ``None`` where that is not possible.

        Never blocks.  `left` is called once it has left, or never will.
        """
        lane = self.send_lane_of(peer, CONTROL_LANE)
        operation = self.unlisted("control message", lane.key)
        operation.notify = left
        try:
            lane.post(operation, plain(Kind.CONTROL, encode_control(message)))
            return operation
        except CommError as error:
            logger.debug(
                "commlayer: no %s to rank %d: %s", type(message).__name__, peer.rank, error
            )
            return None

    def unlisted(self, kind: str, key: LaneKey) -> Operation:
        """An operation of the library's own, outside ledger and bounds."""
        return Operation(kind, key, 0, self.runtime.now())

    def handle_control(self, peer: Peer, message: Control) -> None:
        """Act on a control message of `peer`.  Called by the driver of its control lane."""
        if isinstance(message, (Ask, Answer)):
            if self.inquired is not None:
                self.inquired(peer.rank, message)
            return
        if not all(self.tags.valid(*name) for name in message.lanes()):
            raise protocol_error(f"control message of rank {peer.rank}", "it names an unknown lane")
        if isinstance(message, LaneBroken):
            self.send_lane_of(peer, message.lane).fail(
                CommError(
                    ErrorKind.PROTOCOL,
                    f"send to rank {peer.rank} (channel {message.lane[0]}, tag {message.lane[1]})",
                    f"rank {peer.rank} refuses the lane: {message.cause}",
                    "See that rank's error",
                ),
                stuck=True,
                since=message.taken,
            )
        else:
            self._parting.heard(peer, message)

    def close(self, timeout: float) -> bool:
        """Drain, part from every peer, and end every lane, within `timeout` seconds.

        True if every lane has ended, so that the transport can be released now.
        Raises `CommError` (CLOSED) naming what is undelivered, or `CommTimeout`
        naming peers that did not answer; the connection is closed all the same.
        A close that was interrupted is taken up by the next one; otherwise a
        second one does nothing.
        """
        with self.lock:
            if self._closing:
                return False
            self._closing = True
            self.closed = self.closed or CommError(
                ErrorKind.CLOSED,
                "communicator",
                f"rank {self.rank} has closed it",
                "Create a new one by connect()",
            )
        try:
            ended = self._parting.end(self.closed, timeout)
        except CommError:
            self._monitor.close()
            raise
        except BaseException:
            self._closing = False
            raise
        self._monitor.close()
        return ended

    def forsake(self, error: CommError) -> None:
        """Close without any native call: after a fork, in the child."""
        self._closing = True
        self.closed = error


class _ControlClaim:
    """Asks for the next control message, again and again."""

    at_most = -1

    def __init__(self, connection: Connection, peer: Peer, lane: RecvLane) -> None:
        self._connection = connection
        self._peer = peer
        self._lane = lane
        self.operation = Operation("control receive", lane.key, 0, connection.runtime.now())

    def refusal(self, incoming: Incoming) -> None:
        return None

    def buffer(self, incoming: Incoming, index: int) -> None:
        return None

    def value(self, incoming: Incoming) -> Any:
        where = self.operation.describe()
        try:
            if incoming.kind is not Kind.CONTROL:
                raise protocol_error(where, "it is not a control message")
            message = decode_control(incoming.body.value, where)
            self._lane.claim(_ControlClaim(self._connection, self._peer, self._lane))
            self._connection.handle_control(self._peer, message)
        except CommError as error:
            self._connection.lose(self._peer.rank, error)
            raise
        return None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
