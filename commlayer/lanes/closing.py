"""How two ranks part: what each still owes the other, and a goodbye on every lane.

A receive that is posted cannot be withdrawn, and a transport that is released with one
posted aborts or hangs.  So a rank does not simply stop: it tells its peer which lanes it
receives on, and the peer ends each of them with a goodbye, the last message, which completes
whatever is posted.  In turn it takes in what the peer has sent and it does not want.  Either
side may begin, or both at once; a `Bye` and a `ByeAck` say the same things.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from commlayer.errors import CommError, CommTimeout, ErrorKind, PeerLost, connection_with
from commlayer.lanes.context import LaneContext
from commlayer.lanes.peer import Peer
from commlayer.lanes.sending import SendLane
from commlayer.progress.deadline import Deadline
from commlayer.progress.ledger import Block
from commlayer.progress.operation import Operation
from commlayer.progress.procedure import Driven
from commlayer.wire.control import MAX_BLAME, Blame, Bye, ByeAck, LaneName, Taken
from commlayer.wire.tags import BROADCAST, CONTROL_LANE

logger = logging.getLogger("commlayer")

_FAREWELL = 1.0
"""Seconds of the limit that are kept for parting, after sends were waited for; a quarter of a
limit below 4 s."""


class Closing:
    """The closing of a connection, and the answer to a peer that closes.

    Methods may be called from any thread, progress drivers included; `run` once.
    """

    def __init__(self, peers: Mapping[int, Peer], context: LaneContext, block: Block) -> None:
        """`block` is how a thread waits for an event."""
        self._peers = peers
        self._context = context
        self._block = block
        self._told: set[int] = set()
        """Ranks that were sent a goodbye."""
        self._announced: dict[int, set[LaneName]] = {rank: set() for rank in peers}
        """Lanes on which a rank was told to await one."""

    def hear(self, peer: Peer, message: Bye | ByeAck) -> None:
        """Act on the goodbye of `peer`, or on its answer to this rank's."""
        if isinstance(message, Bye):
            error = _why(peer, message)
            self._keep(peer, message.sent)
            peer.close(error)

        def end() -> None:
            if isinstance(message, Bye):
                self._answer(peer, message, error)
            self._part(peer, message)
            peer.part()

        self._once_made(peer, end)

    def _once_made(self, peer: Peer, then: Callable[[], None]) -> None:
        """Call `then` once the ranks agree on no device lane any more.

        They do so over the control lane: its goodbye comes after.
        """
        device = self._context.device
        if device is None:
            then()
        else:
            device.maker.once_made(peer.rank, then)

    def _answer(self, peer: Peer, message: Bye, error: CommError) -> None:
        with peer.lock:
            lanes = list(peer.sends.items())
        taken = dict(message.receives)
        pending = tuple(name for name, lane in lanes if lane.pending and name != CONTROL_LANE)
        for name, lane in lanes:
            if name != CONTROL_LANE:
                lane.fail(error, stuck=False, since=taken.get(name, 0))
        self._announced[peer.rank].update(pending)
        peer.post_control(ByeAck(self._open_receives(peer), pending))

    def _keep(self, peer: Peer, sent: Iterable[LaneName]) -> None:
        """Listen to lanes that hold messages nobody has asked for, unless this rank closes too."""
        for name in sent:
            if peer.closed is not None:
                return
            lane = peer.recv_lane(name)
            # Again: this rank may have begun to close before it saw the new lane.
            if peer.closed is not None:
                lane.discard(peer.closed)

    def _open_receives(self, peer: Peer) -> tuple[Taken, ...]:
        with peer.lock:
            lanes = list(peer.receives.items())
        return tuple(
            (name, lane.taken) for name, lane in lanes if lane.open and name != CONTROL_LANE
        )

    def _part(self, peer: Peer, message: Bye | ByeAck) -> None:
        """End every lane with a goodbye where the peer listens, and expect the peer's."""
        error = peer.refusal
        assert error is not None
        with peer.lock:
            sends = list(peer.sends.items())
            receives = list(peer.receives.items())
        for name in message.sends:
            peer.recv_lane(name).discard(error)
        for name, receiving in receives:
            if name not in message.sends:
                receiving.expect_goodbye()
        listening = {name for name, _ in message.receives}
        listening.update(
            name
            for name, lane in sends
            if not lane.stuck and (lane.pending or name in self._announced[peer.rank])
        )
        listening.discard(CONTROL_LANE)
        for name in listening:
            self._say_goodbye(peer, peer.send_lane(name), error)
        for name, lane in sends:
            if name not in listening and name != CONTROL_LANE:
                lane.finish(None, error)
        self._say_goodbye(peer, peer.send_lane(CONTROL_LANE), error)

    def _say_goodbye(self, peer: Peer, lane: SendLane, why: CommError) -> None:
        try:
            lane.finish(peer.internal_operation("goodbye", lane.key), why)
        except CommError as error:
            logger.debug("commlayer: no goodbye %s: %s", lane.key, error)

    def run(self, closed: CommError, timeout: float, failure: PeerLost | None, drain: bool) -> bool:
        """Drain, part from every peer, and end every lane, within `timeout` seconds.

        True if every lane has ended.  Raises `CommError` (CLOSED) naming what is
        undelivered, or `CommTimeout` naming peers that did not answer.  A `failure` of this
        rank is told to all of them.
        """
        peers, context = self._peers.values(), self._context
        runtime, device = context.runtime, context.device
        deadline = Deadline(runtime.now, timeout)
        for peer in peers:
            for lane in list(peer.sends.values()):
                if lane.key.name != CONTROL_LANE:
                    lane.refuse(closed)
        if drain:
            self._tell_unasked_broadcasts()
        patience = timeout - min(_FAREWELL, timeout / 4) if drain else 0.0
        draining = Deadline(runtime.now, patience)
        undelivered = self._drain(draining)
        blame = self._blame(failure)
        for peer in peers:
            self._await_device_lanes(peer, draining)
            self._say_bye(peer, closed, blame)
        if device is not None:
            device.advance()
        silent = []
        for peer in peers:
            if not self._block(peer.parted, deadline.remaining()):
                silent.append(peer.rank)
        ended = context.progress.join(self._lanes(silent), deadline)
        if device is not None:
            device.advance()
            present = {peer.rank for peer in peers if not peer.lost} - set(silent)
            ended &= device.join(present, deadline)
            device.stop()
        context.progress.stop()
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

    def _tell_unasked_broadcasts(self) -> None:
        """Log broadcasts that are here and were not received: after a skip, all are off by one."""
        for peer in self._peers.values():
            for (channel, tag), lane in list(peer.receives.items()):
                if tag == BROADCAST and lane.unclaimed and not peer.lost:
                    # No error: a rank that leaves early, rightly, cannot be told from one that
                    # skipped a call.
                    logger.error(
                        "commlayer: closing, and nobody has asked for %d broadcasts of rank %d on "
                        "channel %r: a call was skipped, or this rank stops early.  With step= a "
                        "skipped call raises at once",
                        lane.unclaimed,
                        peer.rank,
                        channel,
                    )

    def _blame(self, failure: PeerLost | None) -> Blame | None:
        """Whose fault it is that this rank leaves: the first peer's that was lost, or its own.

        So a rank that leaves because of a loss does not hide it from those that have not
        heard of it.
        """
        lost = [peer for peer in self._peers.values() if isinstance(peer.error, PeerLost)]
        first = min(lost, key=lambda peer: peer.since, default=None)
        error = failure if first is None else first.error
        if error is None or error.peer is None:
            return None
        return Blame(error.peer, error.cause[:MAX_BLAME], error.cure[:MAX_BLAME])

    def _drain(self, deadline: Deadline) -> list[Operation]:
        """Wait for all pending sends; those undelivered at `deadline`, or when the peer closed."""
        ledger = self._context.ledger
        pending = ledger.pending_sends()
        ledger.notice_all()
        for operation in pending:
            ledger.wait(operation, deadline.remaining())
        return [each for each in pending if not each.settled or _refused(each)]

    def _await_device_lanes(self, peer: Peer, deadline: Deadline) -> None:
        made = self._context.runtime.event()

        def wake() -> None:
            made.set()
            if self._context.device is not None:
                self._context.device.notify()

        self._once_made(peer, wake)
        self._block(made, deadline.remaining())

    def _say_bye(self, peer: Peer, closed: CommError, blame: Blame | None) -> None:
        with peer.lock:
            receives = [lane for name, lane in peer.receives.items() if name != CONTROL_LANE]
            sends = list(peer.sends.items())
        for receiving in receives:
            receiving.discard(closed)
        if peer.error is not None or peer.rank in self._told:
            return
        self._told.add(peer.rank)
        pending = tuple(
            name for name, lane in sends if lane.pending and not lane.stuck and name != CONTROL_LANE
        )
        for name, lane in sends:
            if name in pending:
                lane.fail(closed, stuck=False)
        self._announced[peer.rank].update(pending)
        sent = tuple(
            name
            for name, lane in sends
            if lane.posted and not lane.stuck and name not in (*pending, CONTROL_LANE)
        )
        peer.post_control(Bye(self._open_receives(peer), pending, sent, blame))

    def _lanes(self, silent: Iterable[int]) -> list[Driven]:
        return [
            lane
            for peer in self._peers.values()
            if not peer.lost and peer.rank not in silent
            for lane in peer.lanes()
            if not lane.stuck
        ]

    def _stuck(self) -> bool:
        return any(
            peer.lost or any(lane.stuck for lane in peer.lanes()) for peer in self._peers.values()
        )


def _why(peer: Peer, message: Bye) -> CommError:
    """The error of what can no longer be done with a peer that says goodbye."""
    if message.blame is None:
        return CommError(
            ErrorKind.CLOSED,
            connection_with(peer.rank),
            f"rank {peer.rank} has closed its communicator",
            "Receive everything before closing, or stop sending before the peer closes",
        )
    rank, what, cure = message.blame.rank, message.blame.what, message.blame.cure
    if rank != peer.rank:
        what += f", and rank {peer.rank} closed after it"
    return PeerLost(connection_with(rank), what, cure)


def _refused(operation: Operation) -> bool:
    return operation.error is not None and operation.error.kind is ErrorKind.CLOSED
