"""What is sent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KIB, MIB = 1 << 10, 1 << 20


def one_tensor(nbytes: int) -> Tensor:
    """A bfloat16 tensor of `nbytes`, whose memory was touched."""
    return torch.ones(nbytes // 2, dtype=torch.bfloat16)


def two_tensors(nbytes: int) -> dict[str, Tensor]:
    """What one pipeline stage hands to the next: two tensors of `nbytes` each."""
    return {"hidden_states": one_tensor(nbytes), "residual": one_tensor(nbytes)}


def many_tensors(count: int, nbytes: int) -> dict[str, Tensor]:
    """A dict of `count` tensors of `nbytes` each."""
    return {f"layer.{i}": one_tensor(nbytes) for i in range(count)}


def step_plan(nbytes: int) -> Any:
    """A scheduler's step as Python values: requests, and a token for each; about `nbytes`."""
    count = max(1, nbytes // 16)
    return {
        "step": 7,
        "requests": [f"r{i % 1000:04d}" for i in range(count)],
        "tokens": [i * 7919 % 128_000 for i in range(count)],
    }


def size_text(nbytes: float) -> str:
    """``65536`` as ``64 KiB``."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes:g} B"
