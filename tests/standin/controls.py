"""What tests ask of the stand-in, and what they make it do, in the process that runs on it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ILLEGAL_ADDRESS = 700
"""cudaErrorIllegalAddress."""

EVENT_CREATES = ("cudaEventCreateWithFlags",)
EVENT_DESTROYS = ("cudaEventDestroy",)
RECORDS = ("cudaEventRecord", "cudaEventRecordWithFlags")
STREAM_WAITS = ("cudaStreamWaitEvent",)
QUERIES = ("cudaEventQuery", "cudaStreamQuery")
KERNELS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "nccl kernel")
SET_DEVICES = ("cudaSetDevice",)


def loaded() -> bool:
    """Whether this process runs on the stand-in."""
    return hasattr(ctypes.CDLL(None), "standin_counters")


def counters() -> Counter[str]:
    """How often each call of CUDA and NCCL was made in this process, by its name.

    Beside them: ``nccl kernel``, ``event with timing``, ``communicator of at most N CTAs``, and
    ``unsupported: …`` for each call or kernel that the stand-in does not do.
    """
    rows = (row.rpartition("=") for row in _text("standin_counters").splitlines())
    return Counter({name: int(number) for name, _, number in rows})


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls made inside, once the block is over: ``with counted() as calls: ...``."""
    before = counters()
    calls: Counter[str] = Counter()
    yield calls
    calls.update(counters() - before)


def total(calls: Counter[str], names: tuple[str, ...]) -> int:
    """How many of `calls` are of `names`, for example ``total(calls, RECORDS)``."""
    return sum(calls[name] for name in names)


def contexts() -> dict[int, str]:
    """The devices that this process has a context on, and what opened it."""
    lines = (line.split("=", 1) for line in _text("standin_contexts").splitlines())
    return {int(device): who for device, who in lines}


def unsupported() -> list[str]:
    """What this process asked for and the stand-in does not do."""
    return sorted(name for name in counters() if name.startswith("unsupported: "))


def break_device(index: int, error: int = ILLEGAL_ADDRESS) -> None:
    """Let every call on a device fail from now on, as after an illegal address in a kernel."""
    _library().standin_break_device(index, error)


def break_communicators() -> None:
    """Let every NCCL communicator of this process report that a remote process is gone."""
    _library().standin_break_communicators()


def refuse_posts() -> None:
    """Let every NCCL operation that this process posts from now on fail at the post."""
    _library().standin_refuse_posts()


def _library() -> Any:
    return ctypes.CDLL(None)


def _text(function: str) -> str:
    room = 1 << 12
    while True:
        buffer = ctypes.create_string_buffer(room)
        needed = getattr(_library(), function)(buffer, room)
        if needed <= room:
            return buffer.value.decode()
        room = needed
