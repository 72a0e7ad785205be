"""How the communicators of device lanes are made.

Why it needs an agreement: making a communicator blocks until the other rank makes it, too, on
most transports in its first operation.  Ranks that make two in crossed orders wait for each
other for ever, some libraries stand still in a whole process meanwhile, and a rank that is
busy elsewhere would look dead to one that waits for it in a store.

So a rank makes one communicator at a time, on a task of its own, and only once the other rank
has said that it begins, too.  Of two ranks the lower one leads: it says that it is ready, and
waits.  The higher one answers as soon as it makes nothing else.  Whoever waits waits for a
higher rank, and the highest leads nobody: the waits cannot form a circle.  No call of a user
waits for any of this; what he posts is held until the lane has its communicator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from commlayer.device.backend import PairEndpoint, StreamTransport
from commlayer.device.device import DeviceRuntime
from commlayer.progress.operation import LaneKey
from commlayer.progress.runtime import Event, Runtime
from commlayer.semantics import OperationSemantics, Poll, WaitBlocks
from commlayer.wire.control import OpenLane
from commlayer.wire.tags import BROADCAST, OBJECTS

_LOOK = 0.001
"""Seconds between two looks at whether a communicator is connected."""


class Flow(NamedTuple):
    """A device lane as both its ranks name it: `up` goes to the higher one."""

    channel: str
    tag: str
    up: bool

    def __str__(self) -> str:
        return f"{self.channel}/{self.tag}/{'up' if self.up else 'down'}"

    def key(self, rank: int, peer: int) -> LaneKey:
        """What `rank` calls the lane that it shares with `peer`."""
        return LaneKey(self.channel, peer, "send" if self.up == (rank < peer) else "recv", self.tag)


def flow_of(key: LaneKey, rank: int) -> Flow:
    """The flow of lane `key` of `rank`."""
    return Flow(key.channel, key.tag, (rank < key.peer) == (key.direction == "send"))


def first_flows(channels: Collection[str]) -> list[Flow]:
    """The lanes of two ranks that `connect` makes, in order: those without tags of the user's."""
    others = sorted(set(channels) - {"data", "broadcast"})  # configured in any order
    names = [("data", OBJECTS), ("broadcast", BROADCAST), *((each, OBJECTS) for each in others)]
    return [Flow(channel, tag, up) for channel, tag in names for up in (True, False)]


def first_lanes(
    rank: int, size: int, channels: Collection[str], budget: int
) -> Iterator[tuple[int, Flow]]:
    """Peers and lanes for which `connect` makes communicators, in the order of all ranks.

    At most `budget` a rank, for the ranks that are nearest around the ring: both ends of a
    pair are as far apart, so they agree without a word.  Pairs that share no rank come one
    after the other, to be made at the same time.
    """
    flows = first_flows(channels)
    pairs = sorted(
        (distance, (low // distance) % 2, low, low + step)
        for low in range(size)
        for step in range(1, size - low)
        for distance in [min(step, size - step)]
    )
    left = dict.fromkeys(range(size), budget)
    last = 0
    for distance, _, low, high in pairs:
        if distance != last:
            last = distance
            # All pairs of a distance, or none: otherwise an end could be left over.
            ends = 1 if 2 * distance == size else 2
            if min(left.values()) < min(ends, size - 1) * len(flows):
                return
        for each in (low, high):
            left[each] -= len(flows)
        if rank in (low, high):
            yield from ((low + high - rank, flow) for flow in flows)


def connect_ends(
    endpoint: PairEndpoint,
    sends: bool,
    device: DeviceRuntime,
    stream: AbstractContextManager[Any],
    facts: OperationSemantics,
    runtime: Runtime,
) -> None:
    """Exchange one byte, in which transports connect the ranks.  Blocks until that is done.

    On a stream that has nothing to do: behind the application's work it would wait for it.
    """
    with stream:
        byte = device.empty((1,), torch.uint8)
        work = endpoint.isend(byte, 0, 0) if sends else endpoint.irecv(byte, 0, 0)
        if facts.wait_blocks is WaitBlocks.HOST or facts.poll is not Poll.EXACT:
            endpoint.wait(work)
            passed = device.event()
            passed.record(device.current_stream())
            passed.synchronize()
            return
        while not device.ask(lambda: endpoint.poll(work)):
            runtime.sleep(_LOOK)


class Lanes(Protocol):
    """What the maker tells its side of."""

    def accept(self, peer: int, flow: Flow) -> str:
        """Have a lane for a communicator that `peer` wants; why not, or nothing."""
        ...

    def connected(self, peer: int, flow: Flow, endpoint: PairEndpoint) -> None:
        """Both ends of the lane are connected."""
        ...

    def refused(self, peer: int, flow: Flow, cause: str) -> None:
        """`peer` has no such lane."""
        ...

    def not_made(self, peer: int, flow: Flow, error: Exception) -> None:
        """The transport has raised `error`."""
        ...


class LaneMaker:
    """Makes the communicators of one rank's device lanes, one after the other.

    `tell` posts a message to a peer and returns at once.  `want`, `hear`, `forget` and
    `once_made` are called from any thread.
    """

    def __init__(
        self,
        transport: StreamTransport,
        facts: OperationSemantics,
        runtime: Runtime,
        lanes: Lanes,
        tell: Callable[[int, OpenLane], None],
    ) -> None:
        self._transport = transport
        self._facts = facts
        self._runtime = runtime
        self._lanes = lanes
        self._tell = tell
        self._stream: AbstractContextManager[Any] | None = None
        self._known: set[tuple[int, Flow]] = set()
        self._asking: deque[tuple[int, Flow]] = deque()
        self._leading: deque[tuple[int, Flow]] = deque()
        self._invited: deque[tuple[int, Flow]] = deque()
        self._answers: dict[tuple[int, Flow], str | None] = {}
        self._unmade: set[tuple[int, Flow]] = set()
        self._waiting: list[tuple[int, Callable[[], None]]] = []
        self._gone: set[int] = set()
        self._wake: Event = runtime.event()
        self._running = False
        self._stopped = False

    def make(self, peer: int, flow: Flow) -> PairEndpoint:
        """Make and connect a communicator now; blocks until `peer` does."""
        self._known.add((peer, flow))
        rank = self._transport.rank
        endpoint = self._transport.pair(str(flow), peer)
        sends = flow.key(rank, peer).direction == "send"
        device = self._transport.device
        # One for all, as long as each comes to its end: streams are few, and given out in turn.
        stream, self._stream = self._stream or device.stream(), None
        connect_ends(endpoint, sends, device, stream, self._facts, self._runtime)
        self._stream = stream
        return endpoint

    def want(self, peer: int, flow: Flow) -> None:
        """Have the communicator made, unless it is being made already."""
        if (peer, flow) in self._known:
            return
        self._known.add((peer, flow))
        self._unmade.add((peer, flow))
        leads = self._transport.rank < peer
        (self._leading if leads else self._asking).append((peer, flow))
        self._go_on()

    def hear(self, peer: int, message: OpenLane) -> None:
        """Act on what `peer` says of a lane.  Called by the driver of its control lane."""
        wanted = peer, Flow(*message.lane, message.up)
        if message.stage == "want":
            self.want(*wanted)
            return
        if message.stage == "ready":
            self._known.add(wanted)
            self._unmade.add(wanted)
            self._invited.append(wanted)
        elif self._transport.rank > peer:
            # It leads, and nobody here waits for what it says to a wish.
            self._lanes.refused(peer, wanted[1], message.cause)
            self._is_over(*wanted)
            return
        else:
            self._answers[wanted] = message.cause if message.stage == "refuse" else None
        self._go_on()

    def forget(self, peer: int) -> None:
        """Wait no more for `peer`, which is lost or has closed."""
        self._gone.add(peer)
        for each in list(self._unmade):
            if each[0] == peer:
                self._is_over(*each)
        self._wake.set()

    def once_made(self, peer: int, then: Callable[[], None]) -> None:
        """Call `then` once no communicator with `peer` is wanted that has not been made.

        On this thread, or on one of the maker's.  Until then a message about one may follow,
        in either direction.
        """
        self._waiting.append((peer, then))
        self._call_back()

    def _is_over(self, peer: int, flow: Flow) -> None:
        """The lane has been made or refused, or never will be."""
        self._unmade.discard((peer, flow))
        self._call_back()

    def _call_back(self) -> None:
        for each in list(self._waiting):
            peer, then = each
            if any(other == peer for other, _ in list(self._unmade)):
                continue
            try:
                self._waiting.remove(each)
            except ValueError:
                continue  # another thread calls it
            then()

    def stop(self) -> None:
        """Make no more."""
        self._stopped = True
        self._wake.set()

    def _go_on(self) -> None:
        self._wake.set()
        if not self._running:
            self._running = True
            self._runtime.spawn(self._run, "commlayer device lanes")

    def _run(self) -> None:
        while not self._stopped:
            self._wake.clear()
            if self._asking:
                self._say(*self._asking.popleft(), "want")
            elif self._invited:
                self._follow(*self._invited.popleft())
            elif self._leading:
                self._lead(*self._leading.popleft())
            else:
                self._wake.wait()

    def _follow(self, peer: int, flow: Flow) -> None:
        cause = self._lanes.accept(peer, flow)
        if cause:
            self._say(peer, flow, "refuse", cause)
            self._is_over(peer, flow)
        else:
            self._say(peer, flow, "go")
            self._make(peer, flow)

    def _lead(self, peer: int, flow: Flow) -> None:
        cause = self._lanes.accept(peer, flow)
        if cause:
            # Asked by the peer: it has to hear that nothing comes.
            self._say(peer, flow, "refuse", cause)
            self._is_over(peer, flow)
            return
        self._say(peer, flow, "ready")
        if not self._until(peer, lambda: (peer, flow) in self._answers):
            return
        refused = self._answers.pop((peer, flow))
        if refused is None:
            self._make(peer, flow)
        else:
            self._lanes.refused(peer, flow, refused)
            self._is_over(peer, flow)

    def _say(self, peer: int, flow: Flow, stage: str, cause: str = "") -> None:
        self._tell(peer, OpenLane((flow.channel, flow.tag), flow.up, stage, cause))

    def _make(self, peer: int, flow: Flow) -> None:
        """In a task of its own: a transport may never return from it when the peer dies."""
        made = self._runtime.event()

        def run() -> None:
            try:
                self._lanes.connected(peer, flow, self.make(peer, flow))
            except Exception as error:
                self._lanes.not_made(peer, flow, error)
            finally:
                self._is_over(peer, flow)
                made.set()
                self._wake.set()

        self._runtime.spawn(run, f"commlayer make {flow} {peer}")
        self._until(peer, made.is_set)

    def _until(self, peer: int, over: Callable[[], bool]) -> bool:
        """Wait until `over`; False if the peer is gone, or nothing is to be made any more."""
        while not over():
            if self._stopped or peer in self._gone:
                return False
            self._wake.clear()
            if not (over() or self._stopped or peer in self._gone):
                self._wake.wait()
        return True
