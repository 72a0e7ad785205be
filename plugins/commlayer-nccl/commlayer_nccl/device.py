"""CUDA's events and works, asked without disturbing the capture of a graph.

While any thread captures in CUDA's default (global) mode, an event query of
another thread fails and invalidates the capture, unless that thread has chosen
the thread-local mode (CUDA runtime API, cudaThreadExchangeStreamCaptureMode;
torch's own watchdog does the same, pytorch pull request 148594).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from commlayer.device.device import TorchDevice

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class CudaDevice(TorchDevice):
    """One CUDA device."""

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def ask(self, query: Callable[[], bool]) -> bool:
        """False while the calling thread captures, where nothing may be asked."""
        if torch.cuda.is_current_stream_capturing():
            return False
        exchange = _exchange()
        if exchange is None:
            return query()
        mode = ctypes.c_int(_THREAD_LOCAL)
        exchange(ctypes.byref(mode))
        try:
            return query()
        finally:
            exchange(ctypes.byref(mode))

    def failed_here(self, error: BaseException) -> bool:
        # NCCL passes an error of the runtime on in words of its own.
        return super().failed_here(error) or "ncclUnhandledCudaError" in str(error)


@cache
def _exchange() -> Any:
    """The runtime's function; ``None`` on ROCm, whose queries disturb captures in either mode."""
    if torch.version.cuda is None:
        return None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    return runtime.cudaThreadExchangeStreamCaptureMode
