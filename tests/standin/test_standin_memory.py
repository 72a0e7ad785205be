"""Memory, copies and fills behave as torch's allocator and tensors expect of a device's."""

from __future__ import annotations

import ctypes

import pytest
import torch
from devices.tensors import NBYTES, full, held, runtime, take_device, value
from ranks.pool import Ranks
from standin import controls

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


def fills() -> tuple[list[str], list[str]]:
    take_device()
    wrong = [
        f"{number} x {dtype}"
        for dtype in DTYPES
        for number in (1, 3, 1000, 4099)
        if not bool((torch.full((number,), 1, dtype=dtype, device="cuda").cpu() == 1).all())
    ]
    return wrong, controls.unsupported()


def test_fill_writes_every_element_of_every_type(ranks: Ranks) -> None:
    assert ranks.run(fills, 1) == [([], [])]


def copies() -> dict[str, bool]:
    take_device()
    host = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
    here, there = host.to("cuda:0"), host.to("cuda:1")
    pinned = torch.empty_like(host).pin_memory()
    pinned.copy_(here, non_blocking=True)
    torch.cuda.synchronize()
    return {
        "down": torch.equal(here.cpu(), host),
        "on the other device": torch.equal(there.cpu(), host),
        "from device to device": torch.equal(here.to("cuda:1").cpu(), host),
        "on one device": torch.equal(here.clone().cpu(), host),
        "into pinned memory": torch.equal(pinned, host),
        "pinned memory is known": pinned.is_pinned() and not host.is_pinned(),
    }


def test_copies_arrive_between_host_and_devices(ranks: Ranks) -> None:
    seen = ranks.run(copies, 1)[0]
    assert all(seen.values()), seen


def strided() -> tuple[list[str], list[str]]:
    take_device()
    wrong = []
    for dtype in DTYPES:
        host = (torch.arange(4 * 6 * 8) % 3).to(dtype).reshape(4, 6, 8)
        views = {
            "transposed": lambda t: t.transpose(0, 2),
            "sliced": lambda t: t[1:, :, ::2],
            "expanded": lambda t: t[0, :1].expand(5, 8),
        }
        for name, view in views.items():
            device = view(host.cuda()).contiguous()
            if not torch.equal(device.cpu(), view(host)):
                wrong.append(f"{name} {dtype}")
    return wrong, controls.unsupported()


def test_a_copy_between_layouts_moves_every_element(ranks: Ranks) -> None:
    assert ranks.run(strided, 1) == [([], [])]


def a_source_changes() -> tuple[int, int]:
    take_device()
    stream = torch.cuda.Stream()
    pageable = torch.full((NBYTES,), 3, dtype=torch.uint8)
    pinned = torch.full((NBYTES,), 3, dtype=torch.uint8).pin_memory()
    of_pageable, of_pinned = full(0), full(0)
    torch.cuda.synchronize()
    with held(stream):
        with stream:
            of_pageable.copy_(pageable, non_blocking=True)
            of_pinned.copy_(pinned, non_blocking=True)
        pageable.fill_(9)
        pinned.fill_(9)
    return value(of_pageable), value(of_pinned)


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_by_the_stream(ranks: Ranks) -> None:
    assert ranks.run(a_source_changes, 1) == [(3, 9)]


def by_memset() -> int:
    take_device()
    tensor = full(0)
    stream = torch.cuda.current_stream()
    runtime().cudaMemsetAsync(
        ctypes.c_void_p(tensor.data_ptr()), 6, ctypes.c_size_t(NBYTES),
        ctypes.c_void_p(stream.cuda_stream),
    )  # fmt: skip
    return value(tensor)


def test_memset(ranks: Ranks) -> None:
    assert ranks.run(by_memset, 1) == [6]


def out_of_memory() -> tuple[str, int]:
    take_device()
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(65 << 20, dtype=torch.uint8, device="cuda")
    kept = torch.empty(48 << 20, dtype=torch.uint8, device="cuda")
    return str(error.value), torch.cuda.mem_get_info()[0] + kept.nbytes


def test_a_device_has_as_much_memory_as_it_is_given(ranks: Ranks) -> None:
    message, rest = ranks.run(out_of_memory, 1, environment={"STANDIN_MEMORY_MB": "64"})[0]
    assert "out of memory" in message
    assert rest == 64 << 20


def read_late(recorded: bool) -> tuple[bool, int]:
    """A busy side stream is to read a block that is freed and asked for again."""
    take_device()
    side = torch.cuda.Stream()
    tensor, out = full(3), full(0)
    torch.cuda.synchronize()
    address = tensor.data_ptr()
    with held(side):
        with side:
            out.copy_(tensor)
        if recorded:
            tensor.record_stream(side)
        del tensor
        again = full(9)
        torch.cuda.current_stream().synchronize()
    return again.data_ptr() == address, value(out)


def test_the_allocator_hands_out_a_block_that_another_stream_is_to_read(ranks: Ranks) -> None:
    assert ranks.run(read_late, 1, False) == [(True, 9)]


def test_the_allocator_keeps_a_block_that_was_recorded_on_the_stream(ranks: Ranks) -> None:
    assert ranks.run(read_late, 1, True) == [(False, 3)]
