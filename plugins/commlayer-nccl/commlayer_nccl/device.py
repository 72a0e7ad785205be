"""CUDA's streams and events, asked without disturbing the capture of a graph.

While any thread captures in CUDA's default (global) mode, an event query of
another thread fails and invalidates the capture, unless that thread has chosen
the thread-local mode (CUDA runtime API, cudaThreadExchangeStreamCaptureMode;
torch's own watchdog does the same, pytorch pull request 148594).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from commlayer.device.device import TorchDevice

_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal


class CudaEvent(torch.Event):
    """An event that any thread may query while a graph is captured.

    False while the calling thread captures, where nothing may be asked.
    """

    def query(self) -> bool:
        if torch.cuda.is_current_stream_capturing():
            return False
        exchange = _exchange()
        if exchange is None:
            return super().query()
        mode = ctypes.c_int(_THREAD_LOCAL)
        exchange(ctypes.byref(mode))
        try:
            return super().query()
        finally:
            exchange(ctypes.byref(mode))


class CudaDevice(TorchDevice):
    """One CUDA device."""

    def event(self) -> CudaEvent:
        return CudaEvent(self._device)

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


@cache
def _exchange() -> Any:
    """The runtime's function; ``None`` on ROCm, whose queries disturb captures in either mode."""
    if torch.version.cuda is None:
        return None
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    return runtime.cudaThreadExchangeStreamCaptureMode
