"""What is needed of a device: its memory, streams and events.

The simulator implements the same interface, so that the code above it runs on
a machine without the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from commlayer.progress.runtime import Event, Runtime, Task


class DeviceEvent(Protocol):
    """A point in a stream; the interface of `torch.Event`."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Point(NamedTuple):
    """Where a stream was when `event` was recorded on it."""

    event: DeviceEvent
    stream: Any


class DeviceRuntime(Protocol):
    """One device of this process.

    Streams are context managers that make themselves current, as
    `torch.Stream` does; ``current_stream()`` is that of the calling thread.
    """

    def attach(self) -> None:
        """Make this the device of the calling thread, one of the library's own, for its life.

        Called before it touches an object of the device, the destruction of an event included.
        """
        ...

    def stream(self) -> AbstractContextManager[Any]:
        """A stream; it may be one that somebody else was given, too."""
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

    def ask(self, query: Callable[[], bool]) -> bool:
        """What `query`, which asks events or works, says; it disturbs no capture of a graph.

        False where that cannot be asked now.
        """
        ...

    def failed_here(self, error: BaseException) -> bool:
        """Whether `error` is of this device or its runtime, and not of a peer."""
        ...


class TorchDevice:
    """The current accelerator, through torch's device-independent interface."""

    def __init__(self, kind: str, index: int) -> None:
        self.device = torch.device(kind, index)

    def __str__(self) -> str:
        return str(self.device)

    def attach(self) -> None:
        # A new thread is on device 0.  Whatever it does to an event of another device sets that
        # device and then 0 again, which makes a context on 0: hundreds of MB, on every rank.
        torch.accelerator.set_device_index(self.device.index)

    def stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def event(self) -> torch.Event:
        # Said, because older versions of torch make events that take the time, at its cost.
        return torch.Event(self.device, enable_timing=False)

    def current_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device == self.device

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def capturing(self) -> bool:
        module = torch.get_device_module(self.device)
        is_capturing = getattr(module, "is_current_stream_capturing", None)
        return bool(is_capturing()) if is_capturing is not None else False

    def ask(self, query: Callable[[], bool]) -> bool:
        return query()

    def failed_here(self, error: BaseException) -> bool:
        return isinstance(error, (torch.AcceleratorError, torch.OutOfMemoryError))


class DeviceThreads:
    """A runtime whose tasks are on `device` from their first statement on."""

    def __init__(self, runtime: Runtime, device: DeviceRuntime) -> None:
        self._runtime = runtime
        self._device = device
        self.idle_seconds = runtime.idle_seconds
        self.lock = runtime.lock
        self.event: Callable[[], Event] = runtime.event
        self.now = runtime.now
        self.sleep = runtime.sleep
        self.current = runtime.current

    def spawn(self, function: Callable[[], None], name: str) -> Task:
        def run() -> None:
            self._device.attach()
            function()

        return self._runtime.spawn(run, name)
