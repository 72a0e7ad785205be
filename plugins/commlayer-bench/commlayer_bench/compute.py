"""Stand-ins for what a pipeline stage computes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Compute = Callable[[], None]


def on_a_device(seconds: float) -> Compute:
    """The work is on an accelerator: the host has nothing to do until it is over."""
    return lambda: time.sleep(seconds)


def on_the_host(seconds: float) -> Compute:
    """Matrix products on the calling thread, without the interpreter lock, for `seconds`.

    Takes longer where the processor has more to do.
    """
    left = torch.ones(64, 64)
    out = torch.empty(64, 64)

    def product() -> None:
        torch.mm(left, left, out=out)

    one = statistics.median([seconds_of(product) for _ in range(200)])
    count = max(1, round(seconds / one))

    def compute() -> None:
        for _ in range(count):
            product()

    return compute


def seconds_of(action: Callable[[], object]) -> float:
    """How long `action` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin
