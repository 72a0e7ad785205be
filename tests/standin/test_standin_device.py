"""Contexts, counters, errors, and what is said about what the stand-in does not do."""

from __future__ import annotations

import ctypes
from threading import Thread

import pytest
import torch
from devices.tensors import full, runtime, take_device
from ranks.pool import Ranks
from standin import controls


def one_device() -> dict[int, str]:
    torch.cuda.set_device(1)
    full(0)
    return controls.contexts()


def test_a_process_that_sets_its_device_has_one_context(ranks: Ranks) -> None:
    assert ranks.run(one_device, 1) == [{1: "cudaSetDevice on the main thread"}]


def an_event_on_a_new_thread(set_first: bool) -> dict[int, str]:
    torch.cuda.set_device(1)
    stream = torch.cuda.Stream()

    def record() -> None:
        if set_first:
            torch.accelerator.set_device_index(1)
        torch.Event(torch.device("cuda", 1)).record(stream)

    thread = Thread(target=record)
    thread.start()
    thread.join()
    return controls.contexts()


def test_a_thread_that_did_not_set_its_device_opens_a_context_on_the_first(ranks: Ranks) -> None:
    assert ranks.run(an_event_on_a_new_thread, 1, False) == [
        {0: "cudaSetDevice on another thread", 1: "cudaSetDevice on the main thread"}
    ]
    assert set(ranks.run(an_event_on_a_new_thread, 1, True)[0]) == {1}


def an_event() -> dict[str, int]:
    device = take_device()
    stream = torch.cuda.Stream()
    with controls.counted() as calls:
        event = torch.Event(device, enable_timing=False)
        event.record(stream)
        event.wait(torch.cuda.current_stream())
        event.synchronize()
        event.query()
        del event
    names = (
        controls.EVENT_CREATES, controls.RECORDS, controls.STREAM_WAITS, controls.QUERIES,
        controls.EVENT_DESTROYS, controls.KERNELS,
    )  # fmt: skip
    return {names[0]: controls.total(calls, names) for names in names}


def test_calls_are_counted(ranks: Ranks) -> None:
    assert ranks.run(an_event, 1) == [
        {
            "cudaEventCreateWithFlags": 1,
            "cudaEventRecord": 1,
            "cudaStreamWaitEvent": 1,
            "cudaEventQuery": 1,
            "cudaEventDestroy": 1,
            "cudaLaunchKernel": 0,
        }
    ]


def a_sum() -> list[str]:
    take_device()
    full(1) + 1
    torch.cuda.synchronize()
    return controls.unsupported()


def test_a_kernel_that_does_nothing_is_named(ranks: Ranks) -> None:
    process = ranks.spawn(a_sum, 1)[0]
    (named,) = process.result(60)
    assert named.startswith("unsupported: kernel ")
    assert "add" in named
    assert "is not supported" in process.output


def a_memory_pool() -> tuple[int, list[str]]:
    take_device()
    pool = ctypes.c_void_p()
    return runtime().cudaDeviceGetDefaultMemPool(ctypes.byref(pool), 0), controls.unsupported()


def test_a_call_that_is_missing_is_named_and_fails(ranks: Ranks) -> None:
    process = ranks.spawn(a_memory_pool, 1)[0]
    not_supported = 801
    assert process.result(60) == (not_supported, ["unsupported: cudaDeviceGetDefaultMemPool"])
    assert "stand-in: cudaDeviceGetDefaultMemPool is not supported" in process.output


def looked_up(name: str) -> tuple[int, list[str]]:
    entry, result = ctypes.c_void_p(), ctypes.c_int()
    error = runtime().cudaGetDriverEntryPointByVersion(
        name.encode(), ctypes.byref(entry), 12000, ctypes.c_ulonglong(0), ctypes.byref(result)
    )
    assert error == 0
    return ctypes.CFUNCTYPE(ctypes.c_int)(entry.value or 0)(), controls.unsupported()


def test_a_driver_call_that_is_looked_up_and_missing_is_named_when_it_is_called(
    ranks: Ranks,
) -> None:
    assert ranks.run(looked_up, 1, "cuMemCreate") == [(801, ["unsupported: cuMemCreate"])]


def a_broken_device() -> tuple[str, str]:
    device = take_device()
    event = torch.Event(device)
    event.record()
    torch.cuda.synchronize()
    controls.break_device(0)
    messages = []
    for call in (event.query, torch.cuda.synchronize):
        with pytest.raises(RuntimeError) as error:
            call()
        messages.append(str(error.value).splitlines()[0])
    return messages[0], messages[1]


def test_a_broken_device_fails_every_call_with_the_error_it_has(ranks: Ranks) -> None:
    process = ranks.spawn(a_broken_device, 1)[0]
    for message in process.result(60):
        assert "illegal memory access" in message
