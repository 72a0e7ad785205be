"""All lanes of this rank with all its peers, and how they end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from commlayer.backend import Endpoint
from commlayer.errors import CommError, CommTimeout, ErrorKind, connection_with
from commlayer.liveness.meeting import Link
from commlayer.liveness.monitor import Monitor
from commlayer.streams.side import DeviceSide
from commlayer.tracking.ledger import Ledger
from commlayer.tracking.operation import LaneKey, Operation
from commlayer.tracking.progress import Driven, ProgressEngine
from commlayer.tracking.runtime import Event, Runtime
from commlayer.wire.control import (
    Answer,
    Ask,
    Bye,
    ByeAck,
    Control,
    LaneBroken,
    LaneName,
    Taken,
    decode_control,
    encode_control,
)
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.lane_context import Ahead, LaneContext
from commlayer.wire.outgoing import plain
from commlayer.wire.recv_lane import Incoming, RecvLane
from commlayer.wire.send_lane import SendLane
from commlayer.wire.tags import CONTROL_LANE, TagMap
from commlayer.wire.tensors import Limits

logger = logging.getLogger("commlayer")


class Peer:
    """One other rank: its lanes, and why nothing more can be posted to it, if so.

    `told` says that it was sent a goodbye, and `announced` are the lanes on which
    it was told to await one.

    `parted` is set once nothing more is to be learnt from it: it has answered
    the goodbye, has said its own, or is lost.
    """

    def __init__(self, rank: int, runtime: Runtime) -> None:
        self.rank = rank
        self.sends: dict[LaneName, SendLane] = {}
        self.receives: dict[LaneName, RecvLane] = {}
        self.error: CommError | None = None
        self.lost = False
        self.told = False
        self.announced: set[LaneName] = set()
        self.parted = runtime.event()

    def lanes(self) -> list[SendLane | RecvLane]:
        return [*self.sends.values(), *self.receives.values()]


class Connection:
    """Makes lanes on demand, spreads the loss of a peer, and says goodbye.

    Methods may be called from any thread, progress drivers included.
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
        self._lock = runtime.lock()
        self._closed: CommError | None = None
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
        self._monitor = Monitor(links or {}, peer_timeout, runtime, self)
        self.inquired: Callable[[int, Ask | Answer], None] | None = None
        """Told of what a peer asks or answers, on the driver of its control lane; it may raise
        `CommError` for what cannot be trusted."""

    def open(self) -> None:
        """Begin to listen to every peer."""
        for peer in self.peers.values():
            lane = self._recv_lane(peer, CONTROL_LANE)
            lane.claim(_ControlClaim(self, peer, lane))
        self._monitor.start()

    def _block(self, event: Event, timeout: float) -> bool:
        if self.device is None:
            return self.progress.block(event, timeout)
        return self.device.block(event, timeout)

    def _part_from(self, peer: Peer) -> None:
        peer.parted.set()
        if self.device is not None:
            self.device.notify()

    def advance(self) -> None:
        """Move what only the user's own calls may move.  Called in every one of them."""
        if self.device is not None:
            self.device.advance()

    @property
    def closed(self) -> CommError | None:
        """Why nothing can be posted any more, or ``None`` while open."""
        return self._closed

    def send_lane(self, channel: str, peer: int, tag: str) -> SendLane:
        """The lane for messages to `peer`; raises if this rank or the peer is closed or lost."""
        target = self.peers[peer]
        error = self._closed or target.error
        if error is not None:
            raise error.again()
        return self._send_lane(target, (channel, tag))

    def recv_lane(self, channel: str, peer: int, tag: str) -> RecvLane:
        """The lane for messages from `peer`.  A lane that exists outlives the peer: what it
        has taken in can still be claimed."""
        source = self.peers[peer]
        name = (channel, tag)
        if self._closed is not None:
            raise self._closed.again()
        return source.receives.get(name) or self._recv_lane(source, name, only_if_open=True)

    def _send_lane(self, peer: Peer, name: LaneName) -> SendLane:
        lane = peer.sends.get(name)
        if lane is None:
            with self._lock:
                lane = peer.sends.get(name)
                if lane is None:
                    key = LaneKey(name[0], peer.rank, "send", name[1])
                    lane = SendLane(self._context, self._endpoint, key, self.tags.native(*name))
                    if peer.lost and peer.error is not None:
                        lane.refuse(peer.error)
                    peer.sends[name] = lane
        return lane

    def _recv_lane(self, peer: Peer, name: LaneName, *, only_if_open: bool = False) -> RecvLane:
        with self._lock:
            lane = peer.receives.get(name)
            if lane is not None:
                return lane
            error = self._closed or peer.error
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
        with self._lock:
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
        self._part_from(peer)

    def _lane_broken(self, key: LaneKey, error: CommError) -> None:
        """Tell the sender that nothing it sends on this lane will be received."""
        peer = self.peers[key.peer]
        name = key.name
        if name == CONTROL_LANE:
            self.distrust(peer, error)
        else:
            self._control(peer, LaneBroken(name, peer.receives[name].taken, str(error)))

    def distrust(self, peer: Peer, error: CommError) -> None:
        """Give `peer` up because of what it sent on the control lane."""
        self.lose(peer.rank, error)

    def lose(self, rank: int, error: CommError) -> None:
        """Fail every operation with `rank`, pending and to come, and no other."""
        peer = self.peers[rank]
        peer.error = peer.error or error
        self._lose(peer, error)

    def abandon(self, error: CommError) -> None:
        """Fail everything, with every peer: a task that watches over it has died."""
        for peer in self.peers.values():
            self.distrust(peer, error)

    def tell(self, rank: int, message: Ask | Answer, left: Callable[[], None]) -> bool:
        """Post an inquiry to `rank`, or an answer to its own; False where that is not possible.

        Never blocks.  `left` is called once it has left, or never will; on any task.
        """
        peer = self.peers[rank]
        if self._closed is not None or peer.error is not None:
            return False
        operation = self._control(peer, message, left)
        if operation is not None:
            self.progress.attend(operation)
        return operation is not None

    def _control(
        self, peer: Peer, message: Control, left: Callable[[], None] | None = None
    ) -> Operation | None:
        lane = self._send_lane(peer, CONTROL_LANE)
        operation = self._unlisted("control message", lane.key)
        operation.notify = left
        try:
            lane.post(operation, plain(Kind.CONTROL, encode_control(message)))
            return operation
        except CommError as error:
            logger.debug(
                "commlayer: no %s to rank %d: %s", type(message).__name__, peer.rank, error
            )
            return None

    def _unlisted(self, kind: str, key: LaneKey) -> Operation:
        """An operation of the library's own, outside ledger and bounds."""
        return Operation(kind, key, 0, self.runtime.now())

    def handle_control(self, peer: Peer, message: Control) -> None:
        """Act on a control message of `peer`.  Called by the driver of its control lane."""
        if isinstance(message, (Ask, Answer)):
            if self.inquired is not None:
                self.inquired(peer.rank, message)
            return
        taken: dict[LaneName, int] = {}
        if isinstance(message, LaneBroken):
            named = [message.lane]
        else:
            taken.update(message.receives)
            named = [*taken, *message.sends]
            if isinstance(message, Bye):
                named.extend(message.sent)
        if not all(self.tags.valid(*name) for name in named):
            raise protocol_error(f"control message of rank {peer.rank}", "it names an unknown lane")
        if isinstance(message, LaneBroken):
            self._send_lane(peer, message.lane).fail(
                CommError(
                    ErrorKind.PROTOCOL,
                    f"send to rank {peer.rank} (channel {message.lane[0]}, tag {message.lane[1]})",
                    f"rank {peer.rank} refuses the lane: {message.cause}",
                    "See that rank's error",
                ),
                stuck=True,
                since=message.taken,
            )
            return
        if isinstance(message, Bye):
            error = CommError(
                ErrorKind.CLOSED,
                connection_with(peer.rank),
                f"rank {peer.rank} has closed its communicator",
                "Receive everything before closing, or stop sending before the peer closes",
            )
            self._keep(peer, message.sent)
            with self._lock:
                peer.error = peer.error or error
                lanes = list(peer.sends.items())
            pending = tuple(name for name, lane in lanes if lane.pending and name != CONTROL_LANE)
            for name, lane in lanes:
                if name != CONTROL_LANE:
                    lane.fail(error, stuck=False, since=taken.get(name, 0))
            peer.announced.update(pending)
            self._control(peer, ByeAck(self._open_receives(peer), pending))
        self._part(peer, message)
        self._part_from(peer)

    def _keep(self, peer: Peer, sent: Iterable[LaneName]) -> None:
        """Listen to lanes that hold messages nobody has asked for, unless this rank closes too."""
        for name in sent:
            if self._closed is not None:
                return
            lane = self._recv_lane(peer, name)
            if self._closed is not None:
                lane.sink(self._closed)

    def _open_receives(self, peer: Peer) -> tuple[Taken, ...]:
        with self._lock:
            lanes = list(peer.receives.items())
        return tuple(
            (name, lane.taken) for name, lane in lanes if lane.open and name != CONTROL_LANE
        )

    def _part(self, peer: Peer, message: Bye | ByeAck) -> None:
        """End every lane with a goodbye where the peer listens, and expect the peer's."""
        error = self._closed or peer.error
        assert error is not None
        with self._lock:
            sends = list(peer.sends.items())
            receives = list(peer.receives.items())
        for name in message.sends:
            self._recv_lane(peer, name).sink(error)
        for name, receiving in receives:
            if name not in message.sends:
                receiving.expect_goodbye()
        listening = {name for name, _ in message.receives}
        listening.update(
            name
            for name, lane in sends
            if not lane.stuck and (lane.pending or name in peer.announced)
        )
        listening.discard(CONTROL_LANE)
        for name in listening:
            self._say_goodbye(self._send_lane(peer, name), error)
        for name, lane in sends:
            if name not in listening and name != CONTROL_LANE:
                lane.finish(None, error)
        self._say_goodbye(self._send_lane(peer, CONTROL_LANE), error)

    def _say_goodbye(self, lane: SendLane, why: CommError) -> None:
        try:
            lane.finish(self._unlisted("goodbye", lane.key), why)
        except CommError as error:
            logger.debug("commlayer: no goodbye %s: %s", lane.key, error)

    def close(self, timeout: float) -> bool:
        """Drain, part from every peer, and end every lane, within `timeout` seconds.

        True if every lane has ended, so that the transport can be released now.
        Raises `CommError` (CLOSED) naming what is undelivered, or `CommTimeout`
        naming peers that did not answer; the connection is closed all the same.
        A close that was interrupted is taken up by the next one; otherwise a
        second one does nothing.
        """
        with self._lock:
            if self._closing:
                return False
            self._closing = True
            closed = self._closed = self._closed or CommError(
                ErrorKind.CLOSED,
                "communicator",
                f"rank {self.rank} has closed it",
                "Create a new one by connect()",
            )
        try:
            ended = self._end(closed, timeout)
        except CommError:
            self._monitor.close()
            raise
        except BaseException:
            self._closing = False
            raise
        self._monitor.close()
        return ended

    def _end(self, closed: CommError, timeout: float) -> bool:
        deadline = self.runtime.now() + timeout
        for peer in self.peers.values():
            for lane in list(peer.sends.values()):
                if lane.key.name != CONTROL_LANE:
                    lane.refuse(closed)
        undelivered = self._drain(deadline - min(1.0, timeout / 4))
        for peer in self.peers.values():
            self._say_bye(peer, closed)
        self.advance()
        silent = []
        for peer in self.peers.values():
            remaining = max(0.0, deadline - self.runtime.now())
            if not self._block(peer.parted, remaining):
                silent.append(peer.rank)
        ended = self.progress.join(self._lanes(silent), deadline)
        if self.device is not None:
            self.device.advance()
            present = {p.rank for p in self.peers.values() if not p.lost} - set(silent)
            ended &= self.device.join(present, deadline)
            self.device.stop()
        self.progress.stop()
        if undelivered:
            raise CommError(
                ErrorKind.CLOSED,
                "close",
                f"{len(undelivered)} sends were not delivered, the oldest is "
                f"{undelivered[0].describe()}",
                "See why its receiver did not receive, or give close() a longer timeout",
            )
        if silent:
            raise CommTimeout(
                "close",
                f"no answer within {timeout:g} s from rank {', '.join(map(str, silent))}",
                "The rank is stopped or unreachable; this communicator is closed all the same",
            )
        return ended and not self._stuck()

    def _drain(self, deadline: float) -> list[Operation]:
        """Wait for all pending sends; those undelivered at `deadline`, or when the peer closed."""
        pending = self.ledger.pending_sends()
        self.ledger.attend_all()
        for operation in pending:
            self.ledger.wait(operation, max(0.0, deadline - self.runtime.now()))
        return [each for each in pending if not each.settled or _refused(each)]

    def _say_bye(self, peer: Peer, closed: CommError) -> None:
        with self._lock:
            receives = [lane for name, lane in peer.receives.items() if name != CONTROL_LANE]
            sends = list(peer.sends.items())
        for receiving in receives:
            receiving.sink(closed)
        if peer.error is not None or peer.told:
            return
        peer.told = True
        pending = tuple(
            name for name, lane in sends if lane.pending and not lane.stuck and name != CONTROL_LANE
        )
        for name, lane in sends:
            if name in pending:
                lane.fail(closed, stuck=False)
        peer.announced.update(pending)
        sent = tuple(
            name
            for name, lane in sends
            if lane.posted and not lane.stuck and name not in (*pending, CONTROL_LANE)
        )
        self._control(peer, Bye(self._open_receives(peer), pending, sent))

    def _lanes(self, silent: Iterable[int]) -> list[Driven]:
        return [
            lane
            for peer in self.peers.values()
            if not peer.lost and peer.rank not in silent
            for lane in peer.lanes()
            if not lane.stuck
        ]

    def _stuck(self) -> bool:
        return any(
            peer.lost or any(lane.stuck for lane in peer.lanes()) for peer in self.peers.values()
        )

    def forsake(self, error: CommError) -> None:
        """Close without any native call: after a fork, in the child."""
        self._closing = True
        self._closed = error


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
            self._connection.distrust(self._peer, error)
            raise
        return None


def _refused(operation: Operation) -> bool:
    return operation.error is not None and operation.error.kind is ErrorKind.CLOSED


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
