"""What several checks do in the same way."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.subject import Subject

SMALL, LARGE = 16, 1 << 18
"""Elements that travel inside the header message, and that do not."""
LIMIT = 20.0


def digest(*tensors: torch.Tensor) -> str:
    """Of dtype, shape and bytes, in order."""
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        dense = tensor.detach().cpu().contiguous().reshape(-1)
        state.update(dense.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def pattern(*key: int, elements: int = LARGE) -> torch.Tensor:
    """A tensor that both sides can make, different for each key."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=6).digest(), "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (elements,), dtype=torch.uint8, generator=generator)


def connected(subject: Subject, **settings: Any) -> Communicator:
    """Connect, and return once every rank has."""
    comm = subject.connect(**settings)
    here.meet(f"connected {settings.get('name', '')}")
    return comm


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition without a call that waits for an operation."""
    while not condition():
        time.sleep(0.002)
