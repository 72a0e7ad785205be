"""Host memory in the place of a device's: what a stream is given has happened at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PassedEvent:
    """A point in a stream that has always been reached."""

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HostStream:
    """A context manager that makes itself the thread's current stream; it holds no work."""

    def __enter__(self) -> HostStream:
        self._before = _current.stream
        _current.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _current.stream = self._before


class _Current(threading.local):
    stream = HostStream()  # every thread starts with the same one, as on a device


_current = _Current()


class HostRuntime:
    """Dense host memory, as `commlayer.device.device.DeviceRuntime`."""

    def attach(self) -> None:
        pass

    def stream(self) -> HostStream:
        return HostStream()

    def event(self) -> PassedEvent:
        return PassedEvent()

    def current_stream(self) -> HostStream:
        return _current.stream

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cpu"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # Whatever device the calling thread has chosen for new tensors.
        return torch.empty(shape, dtype=dtype, device="cpu")

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def ask(self, query: Callable[[], bool]) -> bool:
        return query()

    def failed_here(self, error: BaseException) -> bool:
        return False
