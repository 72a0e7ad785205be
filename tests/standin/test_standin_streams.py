"""Streams and events behave as torch expects of a device's."""

from __future__ import annotations

import ctypes
import time
from threading import Event, Thread

import torch
from devices.tensors import full, held, runtime, take_device, value
from ranks.pool import Ranks


def work_waits_its_turn() -> tuple[bool, bool, int]:
    take_device()
    stream = torch.cuda.Stream()
    source, out = full(0), full(0)
    torch.cuda.synchronize()
    with held(stream):
        with stream:
            source.fill_(7)
            out.copy_(source)
        before = stream.query()
    return before, stream.query(), value(out)


def test_a_stream_does_what_it_is_given_in_order_and_the_host_goes_on(ranks: Ranks) -> None:
    assert ranks.run(work_waits_its_turn, 1) == [(False, True, 7)]


def one_stream_is_busy() -> tuple[bool, int]:
    take_device()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    tensor = full(0)
    torch.cuda.synchronize()
    with held(busy):
        with other:
            tensor.fill_(5)
        other.synchronize()
        return busy.query(), value(tensor)


def test_a_busy_stream_does_not_hold_up_another(ranks: Ranks) -> None:
    assert ranks.run(one_stream_is_busy, 1) == [(False, 5)]


def a_stream_waits_for_an_event() -> tuple[bool, bool, int]:
    device = take_device()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source, out = full(0), full(0)
    torch.cuda.synchronize()
    made, copied = torch.Event(device), torch.Event(device)
    with held(first):
        with first:
            source.fill_(7)
            made.record(first)
        with second:
            made.wait(second)
            out.copy_(source)
            copied.record(second)
        early = made.query() or copied.query()
    copied.synchronize()
    return early, made.query(), value(out)


def test_a_stream_that_waits_for_an_event_comes_after_what_was_recorded(ranks: Ranks) -> None:
    assert ranks.run(a_stream_waits_for_an_event, 1) == [(False, True, 7)]


def a_wait_is_for_the_record_before_it() -> tuple[bool, bool]:
    device = take_device()
    busy, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    event = torch.Event(device)
    event.record(busy)
    event.wait(waiting)
    with held(busy):
        event.record(busy)
        waiting.synchronize()
        return waiting.query(), event.query()


def test_a_later_record_of_an_event_does_not_concern_those_who_wait(ranks: Ranks) -> None:
    assert ranks.run(a_wait_is_for_the_record_before_it, 1) == [(True, False)]


def time_between() -> float:
    take_device()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_the_time_between_two_events_covers_the_work_between_them(ranks: Ranks) -> None:
    assert ranks.run(time_between, 1)[0] >= 50


def an_event_is_dropped() -> int:
    device = take_device()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    out = full(0)
    torch.cuda.synchronize()
    event = torch.Event(device)
    with held(first):
        with first:
            out.fill_(3)
            event.record(first)
        event.wait(second)
        del event
    second.synchronize()
    return value(out)


def test_an_event_may_be_destroyed_while_streams_are_still_to_reach_it(ranks: Ranks) -> None:
    assert ranks.run(an_event_is_dropped, 1) == [3]


def distinct_streams() -> int:
    take_device()
    return len({torch.cuda.Stream().cuda_stream for _ in range(40)})


def test_torch_hands_out_streams_from_a_pool_of_thirty_two(ranks: Ranks) -> None:
    assert ranks.run(distinct_streams, 1) == [32]


def record_beyond_the_queue() -> tuple[bool, bool]:
    device = take_device()
    stream = torch.cuda.Stream()
    event = torch.Event(device)
    event.record()  # the native event is made at its first record
    recorded = Event()

    def record() -> None:
        for _ in range(20):
            # Not by `torch.Event.record`, which keeps the interpreter's lock while it blocks.
            runtime().cudaEventRecord(
                ctypes.c_void_p(event.event_id), ctypes.c_void_p(stream.cuda_stream)
            )
        recorded.set()

    recorder = Thread(target=record)
    with held(stream):
        recorder.start()
        blocked = not recorded.wait(0.3)
    recorder.join()
    return blocked, recorded.is_set()


def test_the_host_blocks_where_a_stream_has_as_much_as_the_driver_takes(ranks: Ranks) -> None:
    assert ranks.run(record_beyond_the_queue, 1, environment={"STANDIN_QUEUE": "8"}) == [
        (True, True)
    ]


def a_stream_is_destroyed() -> int:
    take_device()
    handle = ctypes.c_void_p()
    assert runtime().cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
    assert handle.value is not None
    out = full(0)
    torch.cuda.synchronize()
    stream = torch.cuda.ExternalStream(handle.value)
    # It is destroyed with this in it: time enough, and too little would not fail the test.
    with stream:
        torch.cuda._sleep(200_000_000)
        out.fill_(4)
    assert runtime().cudaStreamDestroy(handle) == 0
    deadline = time.monotonic() + 20
    while value(out) != 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    return value(out)


def test_what_a_destroyed_stream_was_given_is_still_done(ranks: Ranks) -> None:
    assert ranks.run(a_stream_is_destroyed, 1) == [4]
