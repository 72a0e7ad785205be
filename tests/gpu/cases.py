"""What is asked of a device: each case once, for the real one and the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from time import perf_counter
from typing import Any

import pytest
from gpu.machine import (
    Case,
    EarlyReuse,
    Machine,
    copy,
    empty,
    eventually,
    full,
    median_us,
    recorded,
)
from torch import Tensor

from commlayer.errors import CommError, ErrorKind

Enter = Callable[[Machine, Tensor], AbstractContextManager[object]]
STREAMS = 4
TRIES = 8


# -- made on one stream, read on another, dropped -----------------------------------


@contextmanager
def _bare(machine: Machine, index: Tensor) -> Any:
    made, side = recorded(machine), machine.device.stream()
    with side:
        made.wait(side)
        yield


def _uses(machine: Machine, index: Tensor) -> AbstractContextManager[object]:
    return machine.comm.side_stream(uses=[index])


def _read_late(machine: Machine, enter: Enter) -> bool:
    """Drop a tensor that a busy side stream is still to read, and allocate its size again.

    Returns whether the allocator handed out the same block; raises `EarlyReuse`
    if the side stream then read what was written there.
    """
    index, out = full(machine, 3), empty(machine)
    address = index.data_ptr()
    with ExitStack() as stack:
        with enter(machine, index):
            stack.enter_context(machine.busy(machine.device.current_stream()))
            copy(machine, index, out)
        del index
        again = full(machine, 9)
        same = again.data_ptr() == address
        machine.figures["same block"] = same
    machine.synchronize()
    seen = machine.value(out)
    if seen != 3:
        raise EarlyReuse(f"3 was written, {seen} was read")
    return same


def without_uses(machine: Machine) -> None:
    for attempt in range(TRIES):
        machine.figures["tries"] = attempt + 1
        _read_late(machine, _bare)


def with_uses(machine: Machine) -> None:
    for _ in range(TRIES):
        assert not _read_late(machine, _uses), "the block was handed out while it was to be read"
    before = machine.held_bytes()
    eventually(machine, lambda: _held_after_allocation(machine) <= before, "the bytes come back")


def _held_after_allocation(machine: Machine) -> int:
    """The allocator looks at its events when it is asked for memory."""
    empty(machine)
    return machine.held_bytes()


# -- events -----------------------------------------------------------------------------


def event_truth(machine: Machine) -> None:
    device = machine.device
    source, out = full(machine, 0), empty(machine)
    main, other = device.current_stream(), device.stream()
    machine.synchronize()
    with machine.busy(main):
        machine.launch("fill", lambda t: t.fill_(7), writes=[source])
        event = recorded(machine)
        with other:
            event.wait(other)
            copy(machine, source, out)
            done = recorded(machine)
        assert not event.query(), "an event in a busy stream counts as passed"
        assert not done.query(), "a stream did not wait for the event"
    eventually(machine, done.query, "the event after the copy")
    assert event.query(), "a later event has passed, an earlier one not"
    assert machine.value(out) == 7, "the waiting stream ran ahead"


# -- two ranks ----------------------------------------------------------------------------


def _warm_up(machine: Machine) -> None:
    """One message each way, so that lanes are connected."""
    comm, tensor = machine.comm, full(machine, 1)
    sent = comm.isend_tensor_dict({"x": tensor}, 1 - comm.rank)
    comm.irecv_tensor_dict(1 - comm.rank).synchronize()
    sent.synchronize()


def _send_and_forget(machine: Machine) -> None:
    comm, device = machine.comm, machine.device
    _warm_up(machine)
    tensor = full(machine, 7)
    with machine.busy(device.current_stream()):
        machine.launch("forward", lambda t: t.fill_(8), writes=[tensor])
        handle = comm.isend_tensor_dict({"x": tensor, "step": 3}, 1)
        del tensor
        again = full(machine, 9)
        assert not handle.is_completed(), "a send of a tensor that is not made yet is complete"
        machine.figures["retained while busy"] = comm.ledger.snapshot().bytes
    eventually(machine, handle.is_completed, "the send")
    eventually(machine, lambda: not comm.ledger.snapshot().operations, "the ledger is empty")
    assert comm.ledger.snapshot().bytes == 0
    machine.figures["retained after"] = comm.ledger.snapshot().bytes
    assert machine.value(again) == 9


def _receive_on_two_streams(machine: Machine) -> None:
    comm, device = machine.comm, machine.device
    _warm_up(machine)
    handle = comm.irecv_tensor_dict(0)
    seen: list[int] = []
    errors: list[BaseException] = []

    def consumer() -> None:
        try:
            with device.stream():
                received = handle.result()
                assert received["step"] == 3
                out = empty(machine)
                copy(machine, received["x"], out)
                done = recorded(machine)
            done.synchronize()
            seen.append(machine.value(out))
        except BaseException as error:
            errors.append(error)
            raise

    tasks = [machine.runtime.spawn(consumer, f"consumer {n}") for n in range(2)]
    for task in tasks:
        task.join()
    assert not errors, f"a consumer raised {errors[0]!r}"
    assert seen == [8, 8], f"the streams read {seen}, 8 was sent"
    eventually(machine, lambda: not comm.ledger.snapshot().operations, "the ledger is empty")


def _refused_in_capture(machine: Machine) -> None:
    comm, device = machine.comm, machine.device
    _warm_up(machine)
    source, out = full(machine, 5), full(machine, 0)
    tensor = full(machine, 7)
    machine.synchronize()
    # Not the default stream: torch waits for that one as a capture begins.
    side = device.stream()
    with side, machine.busy(side):
        machine.launch("forward", lambda t: t.fill_(8), writes=[tensor])
        pending = comm.isend_tensor_dict({"x": tensor}, 1)
        tracked = comm.track(recorded(machine), retain=[tensor])
        with machine.capture() as graph:
            copy(machine, source, out)
            for post in (
                lambda: comm.isend(source, 1),
                lambda: comm.isend_tensor_dict({"x": source}, 1),
                lambda: comm.irecv(out, 1, tag=1),
            ):
                _refused(post)
            assert not pending.is_completed(), "a send in a busy stream is complete"
            assert not tracked.is_completed(), "an event in a busy stream has passed"
            machine.runtime.sleep(0.05)
    graph.replay()
    recorded(machine).synchronize()
    assert machine.value(out) == 5, "the graph does not do what was captured"
    comm.channel("control").send_object("captured", 1)
    eventually(machine, pending.is_completed, "the send posted before the capture")
    eventually(machine, tracked.is_completed, "the event recorded before the capture")
    comm.isend_tensor_dict({"x": source}, 1).synchronize()
    assert not comm.ledger.pending_sends()


def _refused(post: Callable[[], object]) -> None:
    with pytest.raises(CommError) as refusal:
        post()
    assert refusal.value.kind is ErrorKind.UNSUPPORTED, f"refused as {refusal.value!r}"


def _quiet_during_capture(machine: Machine) -> None:
    """Allocates nothing and waits for nothing on the device while the other rank captures."""
    comm = machine.comm
    _warm_up(machine)
    assert comm.channel("control").recv_object(0) == "captured"
    for expected in (8, 5):
        received = comm.irecv_tensor_dict(0).result()
        recorded(machine).synchronize()
        assert machine.value(received["x"]) == expected


# -- work that the library did not post ---------------------------------------------------


def tracked_copy(machine: Machine) -> None:
    comm, device = machine.comm, machine.device
    staged, out = machine.staged(6), empty(machine)
    machine.synchronize()
    side = device.stream()
    with machine.busy(side):
        with side:
            machine.launch(
                "upload", lambda a, b: b.copy_(a, non_blocking=True), reads=[staged], writes=[out]
            )
            handle = comm.track(recorded(machine), retain=[staged])
        del staged
        assert not handle.is_completed(), "a copy behind a busy stream is complete"
        handle.wait()
        ordered = recorded(machine)
        assert not ordered.query(), "wait did not order the current stream"
    eventually(machine, handle.is_completed, "the copy")
    eventually(machine, lambda: not comm.ledger.snapshot().operations, "the ledger is empty")
    ordered.synchronize()
    assert machine.value(out) == 6


def tracked_collective(machine: Machine) -> None:
    comm = machine.comm
    tensor = full(machine, 4)
    handle = comm.track(machine.collective(tensor), retain=[tensor])
    handle.wait()
    copied = empty(machine)
    copy(machine, tensor, copied)
    recorded(machine).synchronize()
    assert machine.value(copied) == 4
    del tensor
    eventually(machine, handle.is_completed, "the collective")
    eventually(machine, lambda: not comm.ledger.snapshot().operations, "the ledger is empty")


# -- the allocator --------------------------------------------------------------------------


def growth(machine: Machine) -> None:
    """Streams read a tensor each and stay busy with something else.

    The block of a tensor that was recorded on its stream is held back until the
    stream has done all that it was given before the free; one that is held by
    reference until the event behind its last read, only until then.
    """
    recording = _most_held(machine, record=True)
    holding = _most_held(machine, record=False)
    machine.figures["recorded"] = f"{recording / machine.block:.0f} blocks"
    machine.figures["held until event"] = f"{holding / machine.block:.0f} blocks"
    assert recording == STREAMS * machine.block, f"recorded: {recording} bytes"
    assert holding == machine.block, f"held until the event: {holding} bytes"


def _most_held(machine: Machine, *, record: bool) -> int:
    device = machine.device
    outs = [empty(machine) for _ in range(STREAMS)]
    sides = [device.stream() for _ in range(STREAMS)]
    machine.synchronize()
    before = most = machine.held_bytes()
    with ExitStack() as busy:
        for side, out in zip(sides, outs, strict=True):
            tensor = full(machine, 1)
            most = max(most, machine.held_bytes())
            made = recorded(machine)
            with side:
                made.wait(side)
                copy(machine, tensor, out)
                read = recorded(machine)
            busy.enter_context(machine.busy(side))
            if record:
                device.record_stream(tensor, side)
            read.synchronize()
            del tensor
    machine.synchronize()
    return most - before


# -- what posting costs -----------------------------------------------------------------------


def _posts(machine: Machine) -> None:
    comm = machine.comm
    _warm_up(machine)
    tensor = full(machine, 1)
    plain, wrapped = [], []
    for _ in range(machine.repeats):
        began = perf_counter()
        work = machine.plain.isend(tensor, 1, 0)
        plain.append(perf_counter() - began)
        work.wait()
        recorded(machine).synchronize()
        began = perf_counter()
        handle = comm.isend(tensor, 1)
        wrapped.append(perf_counter() - began)
        handle.synchronize()
    if machine.timed:
        machine.figures["isend"] = f"{median_us(wrapped):.1f} us"
        machine.figures["transport alone"] = f"{median_us(plain):.1f} us"


def _takes(machine: Machine) -> None:
    comm = machine.comm
    _warm_up(machine)
    tensor = empty(machine)
    for _ in range(machine.repeats):
        machine.plain.irecv(tensor, 0, 0).wait()
        comm.irecv(tensor, 0).synchronize()
    assert machine.value(tensor) == 1


CASES = (
    Case("side stream without uses", "early reuse", (without_uses,), reuse=True),
    Case("side stream with uses", "the value written, and the bytes come back", (with_uses,)),
    Case("event truth", "false before, true after; a waiting stream is ordered", (event_truth,)),
    Case(
        "send and forget, two streams wait",
        "the post does not block; both read what was sent; nothing retained",
        (_send_and_forget, _receive_on_two_streams),
    ),
    Case(
        "post while capturing",
        "refused; polling leaves the capture valid",
        (_refused_in_capture, _quiet_during_capture),
    ),
    Case("tracked copy", "retained until the event; wait orders the stream", (tracked_copy,)),
    Case("tracked collective", "complete without a wait of the caller", (tracked_collective,)),
    Case("allocator growth", f"recorded {STREAMS} blocks, held 1", (growth,)),
    Case("post cost", "measured", (_posts, _takes)),
)
