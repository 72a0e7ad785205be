"""All peers of this rank, what their libraries tell it, and the end of it all.

Each lane is driven on its own, and so is what the libraries tell each other: a control lane
with every peer, received from the moment the connection opens.  Its driver must not wait for
anything that another lane has to do, so every answer is posted and never waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commlayer.backend import Endpoint
from commlayer.config import CommConfig
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind, peer_left
from commlayer.lanes.closing import Closing
from commlayer.lanes.context import LaneContext, Prefetch
from commlayer.lanes.peer import Peer, Whereabouts
from commlayer.lanes.receiving import RecvLane
from commlayer.liveness.meeting import PeerLink
from commlayer.liveness.monitor import Monitor
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import Operation
from commlayer.progress.runtime import Event, Runtime
from commlayer.wire.control import (
    Answer,
    Ask,
    Bye,
    Control,
    LaneBroken,
    OpenLane,
    decode_control,
)
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.reader import Incoming
from commlayer.wire.tags import CONTROL_LANE, TagMap


class Connection:
    """The peers, and what concerns all of them.

    `closed` is why nothing can be posted any more, or ``None`` while open.  Methods may be
    called from any thread, progress drivers included.
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
        config: CommConfig,
        serial: bool,
        prefetch: Prefetch,
        peers_prefetch: Mapping[int, Prefetch],
        whereabouts: Mapping[int, Whereabouts],
        device: DeviceSide | None = None,
        links: Mapping[int, PeerLink] | None = None,
    ) -> None:
        """`prefetch` is what this rank receives ahead, `peers_prefetch` what each other does;
        `whereabouts` says which process each rank is, this one included."""
        self.rank = rank
        self.size = size
        self.runtime = runtime
        self.ledger = ledger
        self.progress = progress
        self.tags = tags
        self.device = device
        self.closed: CommError | None = None
        # Guards `_closing`: of several threads that close, one does.
        self._lock = runtime.lock()
        self._closing = False
        self._forked: CommError | None = None
        self._context = context = LaneContext(
            endpoint, runtime, ledger, progress, config, serial, prefetch, device
        )
        self.peers = {
            r: Peer(r, whereabouts[r], peers_prefetch[r], context, tags)
            for r in range(size)
            if r != rank
        }
        self._whereabouts = whereabouts[rank]
        self._end = Closing(self.peers, context, self.block)
        self._monitor = Monitor(links or {}, config.peer_timeout, runtime, self)
        self.inquired: Callable[[int, Ask | Answer], None] | None = None
        """Told of what a peer asks or answers, on the driver of its control lane; it may raise
        `CommError` for what cannot be trusted."""
        ledger.block = self.block
        if device is not None:
            device.tell = self._open_lane
            device.peer_failed = lambda rank, cause: self.peers[rank].transport_failed(cause)

    def open(self) -> None:
        """Begin to listen to every peer."""
        for peer in self.peers.values():
            lane = peer.recv_lane(CONTROL_LANE)
            lane.claim(_ControlClaim(self, peer, lane))
        self._monitor.start()

    def block(self, event: Event, timeout: float | None) -> bool:
        """Wait until `event` is set, driving what the caller has to; False on timeout.

        The one way in which a thread of the program blocks.  Whoever sets an event that is
        neither an operation's nor the ledger's uses `signal`.
        """
        if self.device is None:
            return self.progress.block(event, timeout)
        return self.device.block(event, timeout)

    def signal(self, event: Event) -> None:
        """Set `event` and wake who waits for it in `block`."""
        event.set()
        if self.device is not None:
            self.device.notify()

    def advance(self) -> None:
        """Move what only the user's own calls may move.  Called in every one of them."""
        if self.device is not None:
            self.device.advance()

    def mark_lost(self, rank: int, error: CommError) -> None:
        """Fail every operation with `rank`, pending and to come, and no other."""
        self.peers[rank].mark_lost(error)

    def abandon(self, error: CommError) -> None:
        """Fail everything, with every peer: a task that watches over it has died."""
        for peer in self.peers.values():
            peer.mark_lost(error)

    def send_inquiry(self, rank: int, message: Ask | Answer, left: Callable[[], None]) -> bool:
        """Post an inquiry to `rank`, or an answer to its own; False where that is not possible.

        Never blocks.  `left` is called once it has left, or never will, on any task.
        """
        peer = self.peers[rank]
        if peer.refusal is not None:
            return False
        operation = peer.post_control(message, left)
        if operation is not None:
            self.progress.notice(operation)
        return operation is not None

    def _open_lane(self, rank: int, message: OpenLane) -> None:
        """Say something of a device lane to `rank`, at once."""
        operation = self.peers[rank].post_control(message)
        if operation is not None:
            self.progress.notice(operation)

    def handle_control(self, peer: Peer, message: Control) -> None:
        """Act on a control message of `peer`.  Called by the driver of its control lane."""
        if isinstance(message, (Ask, Answer)):
            if self.inquired is not None:
                self.inquired(peer.rank, message)
            return
        if not all(self.tags.valid(*name) for name in message.lanes()):
            raise protocol_error(f"control message of rank {peer.rank}", "it names an unknown lane")
        if isinstance(message, Bye) and message.blame and message.blame.rank >= self.size:
            raise protocol_error(f"control message of rank {peer.rank}", "it blames no rank")
        if isinstance(message, OpenLane):
            if self.device is not None:
                self.device.maker.hear(peer.rank, message)
        elif isinstance(message, LaneBroken):
            peer.send_lane(message.lane).fail(
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
            self._end.hear(peer, message)

    def close(self, timeout: float, failure: str = "", *, drain: bool = True) -> bool:
        """Drain, part from every peer, and end every lane, within `timeout` seconds.

        True if every lane has ended, so that the transport can be released now.
        Raises `CommError` (CLOSED) naming what is undelivered, or `CommTimeout`
        naming peers that did not answer; the connection is closed all the same.
        A close that was interrupted is taken up by the next one; otherwise a
        second one does nothing.  The `failure` that this rank leaves by is told to every
        peer; without `drain` at once, whatever is undelivered.
        """
        with self._lock:
            if self._closing:
                return False
            self._closing = True
        closed = self.closed or CommError(
            ErrorKind.CLOSED,
            "communicator",
            f"rank {self.rank} has {f'left it: {failure}' if failure else 'closed it'}",
            "Create a new one by connect()",
        )
        self.closed = closed
        for peer in self.peers.values():
            with peer.lock:
                peer.closed = closed
        try:
            left = peer_left(self.rank, str(self._whereabouts), failure) if failure else None
            ended = self._end.run(closed, timeout, left, drain)
        except CommError:
            self._monitor.close()
            raise
        except BaseException:
            self._closing = False
            raise
        self._monitor.close()
        return ended

    def close_after_fork(self, error: CommError) -> None:
        """Close, and settle everything, without any native call: in the child."""
        self._closing = True
        self.closed = self._forked = error
        for peer in self.peers.values():
            peer.closed = error
        self.ledger.close_after_fork(error)
        if self.device is not None:
            self.device.close_after_fork()

    def check_own(self) -> None:
        """Raise where this process has inherited the connection by a fork."""
        if self._forked is not None:
            raise self._forked.again()


class _ControlClaim:
    """Asks for the next control message, again and again."""

    at_most = -1
    copies = False

    def __init__(self, connection: Connection, peer: Peer, lane: RecvLane) -> None:
        self._connection = connection
        self._peer = peer
        self._lane = lane
        self.operation: Operation = peer.internal_operation("control receive", lane.key)

    def leaves(self, incoming: Incoming) -> bool:
        return False

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
            self._peer.mark_lost(error)
            raise
        return None
