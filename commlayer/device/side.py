"""The device side of a connection: one communicator per lane, in program order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from commlayer.device.backend import StreamTransport
from commlayer.device.device import DeviceRuntime
from commlayer.device.lane import DeviceLane
from commlayer.errors import CommError
from commlayer.progress.deadline import Deadline
from commlayer.progress.ledger import Block, Ledger
from commlayer.progress.operation import LaneKey
from commlayer.progress.polling import PollingProgress
from commlayer.progress.runtime import Event, Runtime
from commlayer.semantics import Capture, Semantics
from commlayer.wire.modes import outside_modes


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
    ) -> None:
        self.device: DeviceRuntime = transport.device
        self.facts = semantics.p2p
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

    def lane(self, key: LaneKey, failed: Callable[[Exception], None]) -> DeviceLane:
        """The device part of lane `key`.  Called under `lock`; raises if its peer is lost."""
        error = self._lost.get(key.peer)
        if error is not None:
            raise error.again()
        lane = self._lanes.get(key)
        if lane is None:
            flow = f"{key.channel}/{key.tag}/{'up' if self._goes_up(key) else 'down'}"
            lane = self._lanes[key] = DeviceLane(
                f"device {key}", key, self._transport.pair(flow, key.peer), self, failed
            )
        return lane

    def _goes_up(self, key: LaneKey) -> bool:
        """Whether the messages of lane `key` go from the lower rank to the higher one."""
        return (self._transport.rank < key.peer) == (key.direction == "send")

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

    def wait_for(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Block until `ready`, posting what is postponed meanwhile; False on timeout."""
        deadline = Deadline(self.runtime.now, timeout)
        event = self.runtime.event()
        self._waiters.append(event)
        try:
            while True:
                event.clear()
                self.advance()
                if ready():
                    return True
                if not self._host_block(event, deadline.remaining()):
                    self.advance()
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

    def fail(self, peer: int, error: CommError) -> None:
        """Fail every operation with `peer`, now and later."""
        with self.lock:
            self._lost[peer] = error
            for key, lane in self._lanes.items():
                if key.peer == peer:
                    lane.fail(error)

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
        self.progress.stop()

    def close(self) -> None:
        """Release every communicator."""
        for lane in self._lanes.values():
            lane.close()
