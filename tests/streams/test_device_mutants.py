"""A core with one safeguard taken out is caught by exploring: the scenarios can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from commlayer_testkit.sim import FailureKind, explore
from commlayer_testkit.sim.mount_device import SimDeviceRuntime

from commlayer.backend import World
from commlayer.device.backend import StreamTransport
from commlayer.device.lane import DeviceLane, HeldWorks
from commlayer.device.opening import Flow, LaneMaker
from commlayer.device.payload import ReceivePayload, SendPayload
from commlayer.device.side import DeviceSide
from commlayer.lanes.claims import MessageClaim
from commlayer.lanes.receiving import RecvLane
from commlayer.progress.operation import Operation

Patch = Callable[[pytest.MonkeyPatch], None]


def holds_nothing(patch: pytest.MonkeyPatch) -> None:
    """Nothing but the transport refers to what is sent once it is posted."""
    whole = DeviceLane._post_into

    def post(self: DeviceLane, works: list[Any], message: Any) -> None:
        whole(self, works, message)
        if not message.receives:
            posted = self._queue.pop()
            self._queue.append(posted._replace(message=message._replace(tensors=())))
            message.operation.device.buffers = ()

    patch.setattr(DeviceLane, "_post_into", post)


def completes_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldWorks, "done", lambda self: True)


def waits_for_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HeldWorks, "order", lambda self: None)


def records_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimDeviceRuntime, "record_stream", lambda self, tensor, stream: None)


def posts_unordered(patch: pytest.MonkeyPatch) -> None:
    whole = DeviceLane._post_into

    def post(self: DeviceLane, works: list[Any], message: Any) -> None:
        with self._device.stream():
            whole(self, works, message)

    patch.setattr(DeviceLane, "_post_into", post)


def forgets_the_receivers_stream(patch: pytest.MonkeyPatch) -> None:
    def take(self: DeviceLane, message: Any) -> None:
        message.operation.device.after = None
        whole(self, message)

    whole = DeviceLane._take
    patch.setattr(DeviceLane, "_take", take)


def connects_in_the_first_operation(patch: pytest.MonkeyPatch) -> None:
    """A lane gets its communicator at once, and whoever posts first waits for the peer in it."""

    def want(self: LaneMaker, peer: int, flow: Flow) -> None:
        transport = self._transport
        self._lanes.connected(peer, flow, transport.pair(str(flow), peer))

    patch.setattr(LaneMaker, "want", want)
    patch.setattr(DeviceSide, "connected", _connect)
    patch.setattr(DeviceLane, "_posts_now", lambda self: not self._held)


def _connect(self: DeviceSide, peer: int, flow: Flow, endpoint: Any) -> None:
    self._lanes[flow.key(self._transport.rank, peer)].connect(endpoint)


def makes_lanes_when_first_used(patch: pytest.MonkeyPatch) -> None:
    """Each rank in an order of its own, in a task that waits for the peer to come."""

    def want(self: LaneMaker, peer: int, flow: Flow) -> None:
        if (peer, flow) not in self._known:
            self._known.add((peer, flow))
            self._runtime.spawn(
                lambda: self._lanes.connected(peer, flow, self.make(peer, flow)), "make"
            )

    patch.setattr(LaneMaker, "want", want)


def shares_a_client_of_the_store(patch: pytest.MonkeyPatch) -> None:
    makes_lanes_when_first_used(patch)
    patch.setattr(World, "client", lambda self: self.store)


def keeps_a_stream_waiting(patch: pytest.MonkeyPatch) -> None:
    """A stream of the lane's own waits for each operation from its post on."""
    whole = DeviceLane._post_into

    def post(self: DeviceLane, works: list[Any], message: Any) -> None:
        own = self._own_stream()
        whole(self, works, message)
        with own:
            message.operation.device.work.order()

    patch.setattr(DeviceLane, "_post_into", post)


def posts_in_the_caller(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceLane, "_posts_now", lambda self: self.connected and not self._held)


def one_communicator_a_channel(patch: pytest.MonkeyPatch) -> None:
    whole = StreamTransport.pair
    patch.setattr(
        StreamTransport, "pair", lambda self, name, peer: whole(self, name.rsplit("/", 1)[0], peer)
    )


def one_communicator_a_direction(patch: pytest.MonkeyPatch) -> None:
    whole = StreamTransport.pair
    patch.setattr(
        StreamTransport, "pair", lambda self, name, peer: whole(self, name.rsplit("/", 1)[1], peer)
    )


def waits_past_host_payload(patch: pytest.MonkeyPatch) -> None:
    whole = SendPayload.expect

    def expect(self: SendPayload, operation: Operation, outgoing: Any) -> None:
        whole(self, operation, outgoing)
        assert operation.device is not None
        operation.device.host_payload = False

    patch.setattr(SendPayload, "expect", expect)


def accepts_any_message(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MessageClaim, "refusal", lambda self, incoming: None)


def receives_out_of_order(patch: pytest.MonkeyPatch) -> None:
    def defer(self: ReceivePayload, claim: Any, incoming: Any) -> bool:
        deferred = whole(self, claim, incoming)
        if deferred:
            self._deferred.rotate(1)
        return deferred

    whole = ReceivePayload.defer
    patch.setattr(ReceivePayload, "defer", defer)


def keeps_what_arrived(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecvLane, "_discard_arrived", lambda self, payload: None)


def forgets_device_operations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceSide, "fail", lambda self, peer, error: None)


def wakes_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceSide, "notify", lambda self: None)


MEMORY = (
    FailureKind.USE_AFTER_FREE,
    FailureKind.EARLY_READ,
    FailureKind.OVERWRITTEN,
    FailureKind.ERROR,
)
STUCK = (FailureKind.DEADLOCK, FailureKind.WATCHDOG, FailureKind.ERROR, FailureKind.MISUSE)

MUTANTS: list[tuple[Patch, str, str, tuple[FailureKind, ...]]] = [
    (holds_nothing, "core_device_dicts", "hccl", MEMORY),
    (completes_early, "core_device_dicts", "hccl", MEMORY),
    (completes_early, "core_device_overwrite", "nccl", MEMORY),
    (waits_for_nothing, "core_device_dicts", "nccl", MEMORY),
    (waits_for_nothing, "core_device_overwrite", "hccl", MEMORY),
    (records_nothing, "core_device_two_waiters", "hccl", MEMORY),
    (records_nothing, "core_device_waited_late", "hccl", MEMORY),
    (posts_unordered, "core_device_dicts", "hccl", MEMORY),
    (forgets_the_receivers_stream, "core_device_raw", "hccl_connected", MEMORY),
    (connects_in_the_first_operation, "core_device_sends_first", "xccl", STUCK),
    (connects_in_the_first_operation, "core_device_sends_first", "nccl", (FailureKind.DEADLOCK,)),
    (connects_in_the_first_operation, "core_device_sends_first", "hccl", (FailureKind.DEADLOCK,)),
    (posts_in_the_caller, "core_device_posts_unmatched", "ccl_bindings", (FailureKind.DEADLOCK,)),
    (one_communicator_a_channel, "core_device_receives_first", "hccl_connected", STUCK),
    (one_communicator_a_direction, "core_device_lanes", "hccl_connected", MEMORY),
    (makes_lanes_when_first_used, "core_device_crossed_creation", "one_creation", STUCK),
    (shares_a_client_of_the_store, "core_device_store", "one_creation", STUCK),
    (keeps_a_stream_waiting, "core_device_pool", "pooled", STUCK),
    (waits_past_host_payload, "core_device_overwrite", "xccl", (FailureKind.OVERWRITTEN,)),
    (accepts_any_message, "core_device_refused", "hccl", (FailureKind.ABORT, FailureKind.ERROR)),
    (receives_out_of_order, "core_device_two_claimers", "hccl", (*MEMORY, *STUCK)),
    (keeps_what_arrived, "core_device_close_unclaimed", "hccl", STUCK),
    (forgets_device_operations, "core_device_peer_lost", "hccl", STUCK),
    (wakes_nobody, "core_device_sends_first", "hccl", STUCK),
]


def ids(value: object) -> str:
    return getattr(value, "__name__", str(value)) if not isinstance(value, tuple) else ""


@pytest.mark.parametrize(("mutate", "scenario", "on", "kinds"), MUTANTS, ids=ids)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Patch,
    scenario: str,
    on: str,
    kinds: tuple[FailureKind, ...],
) -> None:
    mutate(monkeypatch)
    for strategy in ("pct", "random"):
        report = explore(scenario, on=on, strategy=strategy, budget=150, shrink=False)
        if report.failure is not None:
            break
    assert report.failure is not None, str(report)
    assert report.failure.kind in kinds, str(report)
