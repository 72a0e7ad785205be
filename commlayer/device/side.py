"""The device side of a connection: its device lanes, and what is posted inside calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from commlayer.device.backend import PairEndpoint, StreamTransport
from commlayer.device.device import DeviceEvent, DeviceRuntime, Point
from commlayer.device.lane import DeviceLane
from commlayer.device.opening import Flow, LaneMaker, flow_of
from commlayer.errors import CommError, DeviceError, UnsupportedError
from commlayer.progress.deadline import Deadline
from commlayer.progress.ledger import Block, Ledger
from commlayer.progress.operation import LaneKey
from commlayer.progress.polling import PollingProgress
from commlayer.progress.runtime import Event, Runtime
from commlayer.semantics import Capture, PostMayBlock, Semantics
from commlayer.wire.control import OpenLane
from commlayer.wire.modes import outside_modes

_LATE = 0.01
"""The share of its time that a thread may learn too late of what it waits for."""
_LATEST = 0.001
"""Seconds that it may be late at most."""


class Postponed(Protocol):
    """A lane with device operations that wait for a call of the user."""

    def advance(self) -> None:
        """Post them, on the calling thread.  Called under the side's lock."""
        ...

    def post_failed(self, error: Exception) -> None:
        """`advance` has raised `error`.  Called without a lock."""
        ...


class DeviceSide:
    """Opens device lanes on demand and posts what has to be posted inside calls.

    Device operations are posted under one lock, never by a driver: where a
    header arrives in the background, its payload's receives wait for the next
    call of the user.
    """

    def __init__(
        self,
        transport: StreamTransport,
        semantics: Semantics,
        runtime: Runtime,
        ledger: Ledger,
        block: Block,
        max_lanes: int,
    ) -> None:
        self.device: DeviceRuntime = transport.device
        self.facts = semantics.p2p
        # Taken after the turn and the lock of a host lane, and before the ledger's.
        self.lock = runtime.lock()
        self.runtime = runtime
        self.ledger = ledger
        self.progress = PollingProgress(runtime, background=True)
        self._capture = semantics.capture
        self._host_block = block
        self._transport = transport
        self._lanes: dict[LaneKey, DeviceLane] = {}
        self._postponed: deque[Postponed] = deque()
        self._waiters: list[Event] = []
        self._lost: dict[int, CommError] = {}
        self._broken: CommError | None = None
        self._spare: list[DeviceEvent] = []
        self._max_lanes = max_lanes
        self.maker = LaneMaker(
            transport, self.facts, runtime, self, lambda rank, message: self.tell(rank, message)
        )
        self.tell: Callable[[int, OpenLane], None]
        """Posts a message to the library of a peer; set before the first lane is made."""
        self.peer_failed: Callable[[int, Exception], object]
        """Told of an error of a peer's communicator; set before the first lane is made."""

    # Lanes

    def lane(self, key: LaneKey) -> DeviceLane:
        """The device part of lane `key`.  Called under `lock`; raises if its peer is lost.

        Beyond `max_lanes` it is one that fails whatever it is given.
        """
        error = self._broken or self._lost.get(key.peer)
        if error is not None:
            raise error.again()
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._new_lane(key)
        if not (lane.connected or lane.refused):
            flow = flow_of(key, self._transport.rank)
            if self.facts.post_may_block is PostMayBlock.NEVER:
                lane.connect(self._transport.pair(str(flow), key.peer))
            else:
                self.maker.want(key.peer, flow)
        return lane

    def _new_lane(self, key: LaneKey) -> DeviceLane:
        used = [each for each, lane in self._lanes.items() if not lane.refused]
        lane = self._lanes[key] = DeviceLane(f"device {key}", key, self)
        if len(used) >= self._max_lanes:
            names = ", ".join(sorted({"/".join(each.name) for each in used}))
            cause = f"all {self._max_lanes} device lanes of rank {self._transport.rank} are in use"
            lane.fail(_no_lane(key, f"{cause} ({names})"))
        return lane

    def open(self, key: LaneKey) -> None:
        """Have the device part of lane `key`; raises where there is none left for it."""
        with self.lock:
            error = self.lane(key).refused
        if error is not None:
            raise error.again()

    # What the maker of lanes tells

    def accept(self, peer: int, flow: Flow) -> str:
        """Have a lane for a communicator that `peer` wants; why not, or nothing."""
        key = flow.key(self._transport.rank, peer)
        with self.lock:
            if self._broken is not None:
                return self._broken.cause
            lane = self._lanes.get(key) or self._new_lane(key)
            return "" if lane.refused is None else lane.refused.cause

    def connected(self, peer: int, flow: Flow, endpoint: PairEndpoint) -> None:
        """Both ends of the lane are connected."""
        key = flow.key(self._transport.rank, peer)
        with self.lock:
            (self._lanes.get(key) or self._new_lane(key)).connect(endpoint)

    def refused(self, peer: int, flow: Flow, cause: str) -> None:
        """`peer` has no such lane."""
        key = flow.key(self._transport.rank, peer)
        with self.lock:
            self._lanes[key].fail(_no_lane(key, f"rank {peer} has none for it: {cause}"))

    def not_made(self, peer: int, flow: Flow, error: Exception) -> None:
        """The transport has raised `error`."""
        self.peer_failed(peer, error)

    # Events: made once and used again, because making and destroying one costs more than a record

    def here(self) -> Point:
        """Where the calling thread's current stream is now."""
        stream = self.device.current_stream()
        event = self.spare_event()
        event.record(stream)
        return Point(event, stream)

    def spare_event(self) -> DeviceEvent:
        """An event that nobody uses."""
        try:
            return self._spare.pop()
        except IndexError:
            return self.device.event()

    def give_back(self, event: DeviceEvent) -> None:
        """Say that nobody uses `event` any more."""
        self._spare.append(event)

    # Posting and waiting in the user's calls

    def postpone(self, lane: Postponed) -> None:
        """Have `lane` advance in the next call of the user.  Called by drivers."""
        self._postponed.append(lane)
        self.notify()

    def notify(self) -> None:
        """Wake everybody in `wait_for`."""
        for event in list(self._waiters):
            event.set()

    def block(self, event: Event, timeout: float | None) -> bool:
        """Block until `event`, posting what is postponed meanwhile; False on timeout.

        Whoever sets the event calls `notify`.
        """
        return self.wait_for(event.is_set, timeout)

    def wait_for(
        self, ready: Callable[[], bool], timeout: float | None, *, asks: bool = False
    ) -> bool:
        """Block until `ready`, posting what is postponed meanwhile; False on timeout.

        With `asks` the calling thread asks the device itself, so often that it learns of its
        end by `_LATE` of the time too late: a native wait would be as quick, and could neither
        post what is postponed nor end when the peer is lost.
        """
        deadline = Deadline(self.runtime.now, timeout)
        since = self.runtime.now()
        event = self.runtime.event()
        self._waiters.append(event)
        try:
            while True:
                event.clear()
                self.advance()
                if asks:
                    self.progress.advance()
                if ready():
                    return True
                limit = deadline.remaining()
                if asks:
                    pause = min(_LATEST, _LATE * (self.runtime.now() - since) + 1e-5)
                    self._host_block(event, pause if limit is None else min(pause, limit))
                elif not self._host_block(event, limit):
                    self.advance()
                    return ready()
                if asks and deadline.expired():
                    return ready()
        finally:
            self._waiters.remove(event)

    @outside_modes
    def advance(self) -> None:
        """Post what was postponed.  Called on the user's thread, in any call."""
        while self._postponed and not self.capture_refused():
            try:
                lane = self._postponed.popleft()
            except IndexError:
                return
            failure = None
            with self.lock:
                try:
                    lane.advance()
                except Exception as error:
                    failure = error
            if failure is not None:
                lane.post_failed(failure)

    def capture_refused(self) -> bool:
        """Whether the caller captures a graph that no operation may become part of."""
        return self._capture is Capture.REFUSED and self.device.capturing()

    # Failing and ending

    def failed_here(self, cause: Exception) -> CommError | None:
        """The error of every device operation from now on, if `cause` is of this rank's device."""
        if not self.device.failed_here(cause):
            return None
        error = self._broken
        if error is None:
            error = self._broken = DeviceError(
                f"device {self.device}",
                f"it reports: {(str(cause).strip().splitlines() or [type(cause).__name__])[0]}",
                "This rank's own device or memory failed, no peer: find the kernel or the "
                "allocation, then restart this process",
            )
            error.__cause__ = cause
        with self.lock:
            for lane in self._lanes.values():
                lane.fail(error)
        return error.again()

    def fail(self, peer: int, error: CommError) -> None:
        """Fail every operation with `peer`, now and later, and free the device of them."""
        with self.lock:
            self._lost[peer] = error
            lanes = [lane for key, lane in self._lanes.items() if key.peer == peer]
            for lane in lanes:
                lane.fail(error)
        self.maker.forget(peer)
        if lanes:
            self.runtime.spawn(lambda: _abort(lanes), f"commlayer abort {peer}")

    def join(self, peers: set[int], deadline: Deadline) -> bool:
        """End the lanes with `peers`; False if device work is still pending at `deadline`."""
        lanes = [lane for key, lane in self._lanes.items() if key.peer in peers]
        for lane in lanes:
            lane.finish()
        return self.progress.join(list(lanes), deadline)

    def close_after_fork(self) -> None:
        """Post nothing any more: after a fork, in the child."""
        self._postponed.clear()
        self._waiters.clear()

    def stop(self) -> None:
        """Say that nothing is posted any more."""
        self.maker.stop()
        self.progress.stop()

    def close(self, timeout: float) -> None:
        """Release every communicator, waiting at most so many seconds for the transport."""
        task = self.runtime.spawn(self._close_lanes, "commlayer close device lanes")
        task.join(timeout)

    def _close_lanes(self) -> None:
        for lane in list(self._lanes.values()):
            lane.close()


def _abort(lanes: list[DeviceLane]) -> None:
    for lane in lanes:
        lane.abort()


def _no_lane(key: LaneKey, cause: str) -> CommError:
    return UnsupportedError(
        f"device lane {key}",
        cause,
        "Use fewer tags and channels for device tensors, or raise max_device_lanes",
    )
