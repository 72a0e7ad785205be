"""Device tensors of one value, which neither fill nor comparison needs a kernel for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
from torch import Tensor

NBYTES = 1 << 20


def take_device() -> torch.device:
    """The device of the calling rank, made current."""
    device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def full(value: int, nbytes: int = NBYTES) -> Tensor:
    """Bytes of the current device, filled on the current stream."""
    return torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")


def value(tensor: Tensor) -> int:
    """What every byte of `tensor` is, -1 if they differ.  Blocks until the current stream is there.

    Compares on the host: a comparison on the device is a kernel.
    """
    host = tensor.cpu().flatten()
    return int(host[0]) if bool((host == host[0]).all()) else -1


@contextmanager
def held(stream: Any) -> Iterator[None]:
    """Keep a stream from going on until the block is over, however long the host takes."""
    release, reached = Event(), Event()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def hold(_: int | None) -> None:
        reached.set()
        release.wait(60)

    runtime().cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), hold, None)
    assert reached.wait(60), "the stream was busy already"
    try:
        yield
    finally:
        release.set()
        stream.synchronize()  # `hold` must live until the stream has left it


def runtime() -> Any:
    """The CUDA runtime that torch uses, to be called without the interpreter's lock."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
