"""The communicator on the simulated device: policies, refusals, and what exploring cannot vary."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from commlayer_testkit.sim import Scenario, all_scenarios, explore
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.mount_core import NoStore, connect_device
from commlayer_testkit.sim.mount_device import SimDeviceRuntime, SimStreamBackend
from commlayer_testkit.sim.profiles import GLOO, PROFILES
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenarios.device_core import DEVICE, NBYTES, Quiet, use
from commlayer_testkit.sim.transport import SimBackend, SimEndpoint, SimTransport
from commlayer_testkit.sim.world import World
from msgspec.structs import replace

from commlayer.backend import World as BackendWorld
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.loading import LoadedBackend
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import DevicePart, LaneKey, Operation
from commlayer.progress.reaping import BackgroundReaping, GateOnDevice, ReapingPolicy
from commlayer.progress.retention import DeviceHold
from commlayer.progress.runtime import ThreadRuntime
from commlayer.progress.waiter import WaiterProgress
from commlayer.registry import Registry
from commlayer.semantics import Semantics, Threads


def run(body: Callable[[Rank], None], on: str, size: int = 2) -> World:
    """One schedule of `size` ranks; fails with the world."""
    world = World(ReplayChoices(), PROFILES[on])
    try:
        world.start(size, body)
        world.run()
        assert world.failure is None, str(world.failure)
    finally:
        world.close()
    return world


# -- bounded exhaustion -----------------------------------------------------------------------


@pytest.mark.parametrize("on", DEVICE)
@pytest.mark.parametrize(
    "name",
    ["core_device_sends_first", "core_device_receives_first", "core_device_virtual_pipeline"],
)
def test_exhausted_at_the_default_schedule(name: str, on: str) -> None:
    report = explore(name, on=on, deviations=0, budget=300)
    assert report.failure is None, str(report)
    assert report.exhausted, str(report)


@pytest.mark.parametrize("on", ["hccl", "xccl"])
@pytest.mark.parametrize("name", ["core_device_raw", "core_device_overwrite"])
def test_exhausted_at_one_deviation(name: str, on: str) -> None:
    report = explore(name, on=on, deviations=1, budget=2_000, verify_every=0)
    assert report.failure is None, str(report)
    assert report.exhausted, str(report)


def test_works_in_inference_mode() -> None:
    """Posting and waiting inside inference mode, drivers included."""
    for name in ("core_device_dicts", "core_device_strided"):
        with torch.inference_mode():
            report = explore(
                all_scenarios()[name], on="hccl", strategy="random", budget=10, verify_every=0
            )
        assert report.failure is None, str(report)


# -- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on", "policy", "fact"),
    [
        ("ccl_bindings", {"retention": "hold_until_event"}, "wait_blocks"),
        ("nccl", {"reaping": "gate_on_device"}, "completion"),
        ("xccl", {"reaping": "gate_on_device"}, "completion"),
    ],
)
def test_an_unsound_policy_is_refused_with_the_fact(
    on: str, policy: dict[str, str], fact: str
) -> None:
    def body(rank: Rank) -> None:
        with pytest.raises(CommError, match=f"unsound: it needs p2p {fact}") as caught:
            connect_device(rank, GLOO, **policy)
        assert caught.value.kind is ErrorKind.CONFIG

    run(body, on, size=1)


@pytest.mark.parametrize(
    "policy",
    [
        {"retention": "hold_until_event"},
        {"reaping": "gate_on_device"},
    ],
    ids=str,
)
def test_a_host_transport_refuses_the_policies_of_devices(policy: dict[str, str]) -> None:
    from commlayer_testkit.sim.mount_core import connect

    def body(rank: Rank) -> None:
        with pytest.raises(CommError, match="unsound: it needs p2p wait_blocks = STREAM"):
            connect(rank, **policy)

    run(body, "gloo", size=1)


def ledger(reaping: ReapingPolicy) -> Ledger:
    runtime = ThreadRuntime()
    return Ledger(runtime, reaping, CommConfig(on_full="raise"), WaiterProgress(runtime))


def mixed(hold: DeviceHold, *, host_payload: bool = False) -> tuple[Operation, weakref.ref[Any]]:
    """A send with a header, device memory, and perhaps host memory."""
    source = torch.zeros(8)
    operation = Operation("isend", LaneKey("data", 1, "send", "0"), 32, 0.0)
    operation.parts = 2
    operation.device = DevicePart(hold, (source,))
    operation.device.host_payload = host_payload
    return operation, weakref.ref(source)


@pytest.mark.parametrize(
    ("hold", "held"), [(DeviceHold.COMPLETION, True), (DeviceHold.EVENT, False)]
)
def test_device_memory_is_let_go_at_its_event(hold: DeviceHold, held: bool) -> None:
    book = ledger(BackgroundReaping())
    operation, source = mixed(hold)
    book.admit(operation)
    book.complete_device_part(operation)
    assert not operation.settled
    assert (source() is not None) is held
    assert book.snapshot().sends == 1
    book.complete(operation)
    assert operation.settled
    assert source() is None
    assert book.snapshot().operations == ()


@pytest.mark.parametrize("host_payload", [False, True])
def test_an_entry_is_gated_by_its_device_part(host_payload: bool) -> None:
    book = ledger(GateOnDevice())
    operation, source = mixed(DeviceHold.COMPLETION, host_payload=host_payload)
    book.admit(operation)
    assert book.snapshot().sends == 1
    book.complete_device_part(operation)
    assert not operation.settled
    assert book.snapshot().sends == (1 if host_payload else 0)
    assert (source() is not None) is host_payload
    book.complete(operation)
    assert operation.settled
    assert book.snapshot().sends == 0


def test_the_gate_opens_in_order() -> None:
    book = ledger(GateOnDevice())
    first, second = (mixed(DeviceHold.COMPLETION)[0] for _ in range(2))
    book.admit(first)
    book.admit(second)
    book.complete_device_part(second)
    assert book.snapshot().sends == 2
    book.complete_device_part(first)
    assert book.snapshot().sends == 0


# -- refusals ------------------------------------------------------------------------


def test_capture_refuses_posting_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing is posted, not even what a header has made ready."""
    capturing = [False]
    monkeypatch.setattr(SimDeviceRuntime, "capturing", lambda self: capturing[0])

    def body(rank: Rank) -> None:
        comm = connect_device(rank, GLOO)
        if rank.index == 0:
            comm.isend(rank.arena.full(3, NBYTES), 1)
            return
        handle = comm.irecv(None, 0)
        tensor = rank.arena.full(1, NBYTES)
        rank.sleep(1.0)
        capturing[0] = True
        for refused in (
            lambda: comm.isend(tensor, 0),
            lambda: comm.irecv(tensor, 0),
            handle.wait,
            handle.result,
        ):
            with pytest.raises(CommError, match="captur") as caught:
                refused()
            assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert not handle.is_completed()
        assert not rank.endpoint("commlayer/sim_device/data/0/up/0-1").pending()
        capturing[0] = False
        use(rank, handle.result(), 3)

    run(body, "hccl")


def test_a_transport_for_one_thread_only_is_refused() -> None:
    def body(rank: Rank) -> None:
        semantics: Semantics = replace(rank.world.profile.semantics, threads=Threads.FUNNELED)
        backend = SimStreamBackend(rank, rank.world.profile)
        backend.semantics = semantics  # type: ignore[misc]
        with pytest.raises(CommError, match="threads = FUNNELED") as caught:
            connected(rank, backend, SimBackend(rank.world, GLOO))
        assert caught.value.kind is ErrorKind.UNSUPPORTED

    run(body, "hccl", size=1)


def connected(rank: Rank, backend: SimStreamBackend, host: SimBackend) -> Communicator:
    registry = Registry(())
    registry.add_backend(host)
    return connect_world(
        BackendWorld(rank.index, len(rank.world.ranks), NoStore(), 60.0),
        LoadedBackend(backend, "test", ""),
        CommConfig(),
        registry=registry,
        runtime=rank.runtime,
    )


# -- two communicators on one device -------------------------------------------------


class _Apart(SimBackend):
    """A host transport whose communicators have names of their own."""

    def open(self, world: BackendWorld, options: Any) -> SimTransport:
        network = self.world.network(self.profile)

        class Transport(SimTransport):
            def endpoint(self, name: str) -> SimEndpoint:
                return super().endpoint(f"second {name}")

        return Transport(network, world.rank)


def test_two_communicators_on_one_device() -> None:
    """Each has lanes and native communicators of its own; crossed waits hold up nothing."""

    def setup(world: World) -> None:
        quiet = Quiet(world)

        def body(rank: Rank) -> None:
            peer = 1 - rank.index
            backend = SimStreamBackend(rank, world.profile)
            backend.name = "second"  # type: ignore[misc]
            comms = [quiet.connect(rank), connected(rank, backend, _Apart(world, GLOO))]
            order = comms if rank.index == 0 else comms[::-1]
            for comm in order:
                comm.isend(rank.arena.full(comms.index(comm), NBYTES), peer)
            for comm in order[::-1]:
                use(rank, comm.recv(None, peer), comms.index(comm))

        world.start(2, body)

    for on in DEVICE:
        report = explore(
            Scenario("two_communicators", setup, None, DEVICE),
            on=on, strategy="random", budget=15, verify_every=0,
        )  # fmt: skip
        assert report.failure is None, str(report)


def test_a_device_transport_has_pairs_only() -> None:
    def body(rank: Rank) -> None:
        backend = SimStreamBackend(rank, rank.world.profile)
        transport = backend.open(BackendWorld(0, 1, NoStore(), 60.0), {})
        with pytest.raises(CommError, match="communicates by pairs") as caught:
            transport.endpoint("p2p")
        assert caught.value.kind is ErrorKind.UNSUPPORTED

    run(body, "hccl", size=1)


@pytest.mark.parametrize("on", DEVICE)
@pytest.mark.parametrize("declared", [False, True], ids=["plain", "declared"])
def test_a_message_without_room_on_the_device_fails_its_receive_only(
    declared: bool, on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = [False]
    made = SimDeviceRuntime.empty

    def empty(self: SimDeviceRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if short[0] and self._rank.index == 1:
            raise torch.OutOfMemoryError("out of memory")
        return made(self, shape, dtype)

    monkeypatch.setattr(SimDeviceRuntime, "empty", empty)
    options: dict[str, Any] = {"at_most": NBYTES} if declared else {}

    def body(rank: Rank) -> None:
        comm = connect_device(rank, GLOO)
        if rank.index == 0:
            sources = [rank.arena.full(value + 1, NBYTES) for value in range(4)]
            rank.device.synchronize()
            for value, source in enumerate(sources):
                comm.broadcast(source, 0, async_op=True, **options)
                assert comm.recv_object(1) == value
            comm.close()
            return
        for value in range(4):
            short[0] = value in (1, 2)
            handle = comm.broadcast(None, 0, async_op=True, **options)
            if short[0]:
                with pytest.raises(CommError, match="no memory for") as caught:
                    handle.wait()
                assert caught.value.kind is ErrorKind.PROTOCOL
            else:
                use(rank, handle.result(), value + 1)
            comm.isend_object(value, 0)
        comm.close()

    run(body, on)


# -- nothing to carry ------------------------------------------------------------------


def test_an_empty_device_tensor_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a dict, alone, and into memory of the caller's."""
    made: list[tuple[int, ...]] = []
    empty = SimDeviceRuntime.empty
    find = SimDeviceRuntime.holds

    def counted(self: SimDeviceRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(tuple(shape))
        return empty(self, shape, dtype)

    monkeypatch.setattr(SimDeviceRuntime, "empty", counted)
    # The arena finds memory by its address, which an empty tensor has not.
    monkeypatch.setattr(
        SimDeviceRuntime, "holds", lambda self, tensor: not tensor.numel() or find(self, tensor)
    )

    def body(rank: Rank) -> None:
        comm, peer = connect_device(rank, GLOO), 1 - rank.index
        nothing = torch.empty((0, 4), dtype=torch.float32)
        comm.isend_tensor_dict({"x": nothing}, peer)
        got = comm.recv_tensor_dict(peer)["x"]
        assert (got.shape, got.dtype) == (nothing.shape, nothing.dtype)
        comm.isend(nothing, peer)
        into = torch.empty((0, 4), dtype=torch.float32)
        assert comm.recv(into, peer) is into

    run(body, "nccl", size=2)
    assert made.count((0, 4)) >= 4, made


def test_a_result_that_a_stream_waits_for_was_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """The handle is dropped before the operation is complete, and its result was taken."""

    def body(rank: Rank) -> None:
        comm, peer = connect_device(rank, GLOO), 1 - rank.index
        comm.isend_tensor_dict({"x": rank.arena.full(rank.index, NBYTES)}, peer)
        use(rank, comm.recv_tensor_dict(peer)["x"], peer)
        comm.drain(10)

    run(body, "nccl")
    assert not caplog.records
