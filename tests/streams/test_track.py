"""Handles and retention for asynchronous work that the library did not post."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commlayer_testkit.local import FUNNELED, WAITED, connected
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.mount_core import connect, connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.streams import Item
from exploring import searched, survives
from msgspec.structs import replace
from ranks.pool import Ranks

import commlayer
from commlayer import CommError, CommTimeout, Communicator, ErrorKind
from commlayer.device.foreign import leaves
from commlayer.semantics import OperationSemantics, Poll

DEVICE = ("hccl", "nccl", "xccl")
LONG = 20.0


def until_released(comm: Communicator, rank: Rank) -> None:
    """Make no call that waits or reaps: look only."""
    while comm.ledger.snapshot().operations:
        rank.sleep(0.01)


# Device events -----------------------------------------------------------------------------------


def copy_of_staging(rank: Rank, *, tracked: bool) -> None:
    """A copy from host memory that nobody waits for; then the device's memory must be free."""
    comm = connect_device(rank, GLOO)
    device = rank.device
    into = rank.arena.empty(16)
    staging = torch.full((16,), 7, dtype=torch.uint8)
    with device.stream() as stream:
        device.launch("copy", lambda a, b: b.copy_(a), reads=[staging], writes=[into])
        event = stream.record_event()
    if tracked:
        comm.track(event, retain={"staging": staging, "into": [into]})
    del staging, into
    until_released(comm, rank)
    device.synchronize()
    assert rank.arena.in_use == 0
    comm.close(30)


@pytest.mark.parametrize("on", DEVICE)
def test_tracked_buffers_live_until_the_event_and_no_longer(on: str) -> None:
    survives(lambda rank: copy_of_staging(rank, tracked=True), on, ranks=1, budget=40)


def test_without_tracking_the_copy_reads_freed_memory() -> None:
    report = searched(
        lambda rank: copy_of_staging(rank, tracked=False), "nccl", ranks=1, budget=100
    )
    assert report.failure is not None
    assert report.failure.kind is FailureKind.USE_AFTER_FREE


def two_streams(rank: Rank) -> None:
    """Two threads wait for one handle, each on its own stream; the host is not held up."""
    comm = connect_device(rank, GLOO)
    device, arena = rank.device, rank.arena
    made = arena.empty(8)
    results = [arena.empty(8) for _ in range(2)]
    with device.stream() as stream:
        device.launch("make", lambda out: out.fill_(5), writes=[made])
        event = stream.record_event()
    handle = comm.track(event, retain=made)

    def reader(out: torch.Tensor) -> None:
        with device.stream() as stream:
            handle.wait()
            device.launch("read", lambda a, b: b.copy_(a), reads=[made], writes=[out])
            stream.synchronize()

    tasks = [rank.spawn(partial(reader, out), "reader") for out in results]
    for task in tasks:
        task.join()
    assert [out.tolist() for out in results] == [[5] * 8] * 2
    handle.synchronize()
    assert handle.is_completed()
    assert handle.result() is None
    assert handle.exception() is None
    comm.close(30)


@pytest.mark.parametrize("on", DEVICE)
def test_every_waiting_stream_is_ordered(on: str) -> None:
    survives(two_streams, on, ranks=1, budget=40)


def out_of_order(rank: Rank) -> None:
    """A later event passes first: it is released although an earlier one is pending."""
    comm = connect_device(rank, GLOO)
    device = rank.device
    gate = device.event()
    gate_stream, slow, fast = (device.stream() for _ in range(3))
    holder = rank.arena.empty(8)
    opened = rank.event()
    gate_stream.enqueue(Gate(opened.is_set))
    gate.record(gate_stream)
    slow.wait_event(gate)
    first = comm.track(slow.record_event(), retain=holder)
    second = comm.track(fast.record_event())
    while not second.is_completed():
        rank.sleep(0.001)
    assert not first.is_completed()
    (pending,) = comm.ledger.snapshot().operations
    assert (pending.kind, pending.direction, pending.nbytes) == ("track", "track", 8)
    assert (comm.ledger.snapshot().sends, comm.ledger.snapshot().bytes) == (0, 0)
    comm.drain(0)
    with pytest.raises(CommTimeout, match=r"tracked .*SimEvent"):
        first.synchronize(0)
    comm.close(0.5)
    opened.set()
    first.synchronize()
    del holder
    until_released(comm, rank)
    assert rank.arena.in_use == 0


class Gate(Item):
    """A stream entry that waits for the host."""

    what = "gate"

    def __init__(self, ready: Callable[[], bool]) -> None:
        self.ready = ready  # type: ignore[method-assign]

    def run(self) -> bool:
        return True


def test_events_complete_in_any_order_and_outlive_drain_and_close() -> None:
    survives(out_of_order, "nccl", ranks=1, budget=40)


# Works -------------------------------------------------------------------------------------------


def foreign_broadcast(rank: Rank) -> None:
    """A collective on a native communicator of the caller's, whose handle is dropped."""
    device = rank.world.profile.semantics.devices != ("cpu",)
    comm = connect_device(rank, GLOO) if device else connect(rank)
    data = rank.arena.full(rank.index + 1, 8) if device else torch.full((8,), rank.index + 1)
    if not device:
        data = data.to(torch.uint8)
    work = rank.endpoint("foreign").broadcast(data, 0)
    handle = comm.track(work, retain=data)
    del work
    if rank.index == 1:
        handle.wait()
        if device:
            rank.device.current_stream().synchronize()
        assert data.tolist() == [1] * 8
    del handle, data
    until_released(comm, rank)
    comm.close(30)
    if device:
        rank.device.synchronize()
        assert rank.arena.in_use == 0


@pytest.mark.parametrize("on", [*DEVICE, "gloo"])
def test_a_foreign_collective_is_held_until_it_is_complete(on: str) -> None:
    survives(foreign_broadcast, on, budget=25)


class Work:
    """As c10d's: holds whoever waits."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.waits = 0
        self.polls = 0
        self.error: Exception | None = None

    def wait(self) -> bool:
        self.waits += 1
        assert self.done.wait(LONG)
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        self.polls += 1
        return self.done.is_set()


EXACT = replace(WAITED, collective=OperationSemantics(poll=Poll.EXACT))


@pytest.mark.parametrize("semantics", [WAITED, EXACT], ids=["waited", "polled"])
def test_a_work_is_waited_once_and_polled_only_where_that_is_exact(semantics: Any) -> None:
    with connected(1, semantics) as (comm,):
        work = Work()
        handle = comm.track(work, retain=[torch.zeros(4)])
        with pytest.raises(CommTimeout):
            handle.wait(0)
        assert not handle.is_completed()
        (pending,) = comm.ledger.snapshot().operations
        assert pending.nbytes == 16
        comm.drain(0)
        work.done.set()
        handle.wait(LONG)
        handle.synchronize(LONG)
        assert handle.is_completed()
        assert work.waits == 1
        assert (work.polls > 0) is (semantics is EXACT)
        assert not comm.ledger.snapshot().operations


@pytest.mark.parametrize("semantics", [WAITED, EXACT], ids=["waited", "polled"])
def test_the_error_of_a_work_is_raised_every_time(semantics: Any) -> None:
    with connected(1, semantics) as (comm,):
        work = Work()
        work.error = RuntimeError("connection closed by peer\nsecond line")
        work.done.set()
        handle = comm.track(work)
        for _ in range(2):
            with pytest.raises(CommError, match=r"reports: connection closed by peer\.") as caught:
                handle.wait(LONG)
            assert caught.value.kind is ErrorKind.PEER_LOST
            assert caught.value.__cause__ is work.error
        assert handle.is_completed()
        assert handle.exception() is not None


def native_collectives() -> None:
    dist.init_process_group("gloo")
    comm = commlayer.connect({"backend": "gloo", "connect_timeout": LONG}, group=dist.group.WORLD)
    if comm.rank == 1:
        comm.recv_object(0)
    handles, totals = [], [torch.full((1 << 12,), float(step)) for step in range(3)]
    for total in totals:
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        handles.append(comm.track(work, retain=total))
        del work
    if comm.rank == 0:
        assert not handles[0].is_completed()
        with pytest.raises(CommTimeout):
            handles[0].wait(0)
        comm.send_object("go", 1)
    handles[0].wait(LONG)
    while comm.ledger.snapshot().operations:
        time.sleep(0.001)
    assert all(handle.is_completed() for handle in handles)
    assert [total[0].item() for total in totals] == [0, 2, 4]
    comm.close()
    dist.destroy_process_group()


def test_native_collectives_are_released_without_a_wait(ranks: Ranks) -> None:
    ranks.run(native_collectives, 2)


def test_many_works_in_any_order_leave_nothing() -> None:
    with connected(1, EXACT) as (comm,):
        works = [Work() for _ in range(20)]
        handles = [comm.track(work, retain=torch.zeros(1)) for work in works]
        for work in reversed(works):
            work.done.set()
        for handle in handles:
            handle.wait(LONG)
        assert not comm.ledger.snapshot().operations
        pending, *later = [Work() for _ in range(4)]
        comm.track(pending)
        for work in later:
            work.done.set()
            comm.track(work).wait(LONG)
        assert len(comm.ledger.snapshot().operations) == 1
        pending.done.set()
        assert max(int(lane.tag) for lane in comm.ledger._lanes if lane.direction == "track") < 20


def test_close_waits_for_a_tracked_work_within_its_limit() -> None:
    with connected(2) as comms:
        work = Work()
        handle = comms[0].track(work)
        timer = threading.Timer(0.05, work.done.set)
        timer.start()
        closing = threading.Thread(target=comms[1].close)
        closing.start()
        comms[0].close(LONG)
        assert handle.is_completed()
        closing.join()
        timer.join()
        with pytest.raises(CommError) as caught:
            comms[0].track(Work())
        assert caught.value.kind is ErrorKind.CLOSED


def test_what_cannot_be_tracked_is_refused() -> None:
    with connected(1) as (comm,):
        for value in (None, 3, threading.Event(), torch.zeros(1)):
            with pytest.raises(CommError, match="neither an event") as caught:
                comm.track(value)
            assert caught.value.kind is ErrorKind.CONFIG
        assert not comm.ledger.snapshot().operations
    with connected(1, FUNNELED) as (comm,):
        with pytest.raises(CommError, match="threads = FUNNELED") as caught:
            comm.track(Work())
        assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_leaves_are_everything_inside_containers_in_order() -> None:
    inner: list[Any] = [1, ("a", {"k": None})]
    inner.append(inner)
    assert list(leaves(inner)) == [1, "a", None]
    buffer = bytearray(3)
    assert list(leaves(buffer)) == [buffer]
