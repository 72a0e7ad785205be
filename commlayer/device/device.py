"""What is needed of a device: its memory, streams and events.

The simulator implements the same interface, so that the code above it runs on
a machine without the device.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class DeviceEvent(Protocol):
    """A point in a stream; the interface of `torch.Event`."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceRuntime(Protocol):
    """One device of this process.

    Streams are context managers that make themselves current, as
    `torch.Stream` does; ``current_stream()`` is that of the calling thread.
    """

    def stream(self) -> AbstractContextManager[Any]:
        """A new stream."""
        ...

    def event(self) -> DeviceEvent:
        """A new event."""
        ...

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        ...

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in the memory of this device."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory of the device, allocated on the current stream."""
        ...

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy between tensors of this device, of the same shape, on the current stream."""
        ...

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Tell the allocator that `stream` uses `tensor` beside the stream it is allocated on."""
        ...

    def capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""
        ...


class TorchDevice:
    """The current accelerator, through torch's device-independent interface."""

    def __init__(self, kind: str, index: int) -> None:
        self._device = torch.device(kind, index)

    def stream(self) -> torch.Stream:
        return torch.Stream(self._device)

    def event(self) -> torch.Event:
        return torch.Event(self._device)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def capturing(self) -> bool:
        module = torch.get_device_module(self._device)
        is_capturing = getattr(module, "is_current_stream_capturing", None)
        return bool(is_capturing()) if is_capturing is not None else False
