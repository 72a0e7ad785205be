"""Which memory a backend reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation
from commlayer.semantics import Capture, Semantics
from commlayer.wire.storage import has_memory
from commlayer.wire.tensors import DTYPES, overlaps


class Memory:
    """Refuses tensors that a backend, or the host backend beside it, cannot use now."""

    def __init__(
        self,
        backend: str,
        semantics: Semantics,
        host_devices: tuple[str, ...],
        side: DeviceSide | None,
    ) -> None:
        self._backend = backend
        self._semantics = semantics
        self._host_devices = host_devices
        self._side = side

    def on_device(self, tensor: Tensor) -> bool:
        """Whether the device transport takes `tensor`."""
        return self._side is not None and self._side.device.holds(tensor)

    def check_sources(self, tensors: Sequence[Tensor], operation: Operation) -> None:
        """Raise `CommError` (UNSUPPORTED) unless all `tensors` can be sent."""
        for tensor in tensors:
            if not self._reaches(tensor):
                raise CommError(
                    ErrorKind.UNSUPPORTED,
                    operation.describe(),
                    f"backend {self._backend!r} does not read memory of {tensor.device} here",
                    "Choose a backend for that device, or copy the tensor to "
                    f"{' or '.join(self._semantics.devices)} first",
                )
            self._check_capture(tensor, operation)

    def check_target(self, tensor: Tensor, operation: Operation) -> None:
        """Raise `CommError` (UNSUPPORTED) unless `tensor` can be received into."""
        cause = ""
        if not isinstance(tensor, Tensor):
            cause = f"{type(tensor).__name__} is not a tensor"
        elif tensor.is_nested or tensor.layout is not torch.strided:
            cause = "a tensor that is not dense cannot be received into"
        elif tensor.dtype not in DTYPES.values():
            cause = f"a tensor of {tensor.dtype} cannot be received into"
        elif not self._reaches(tensor):
            cause = f"backend {self._backend!r} does not write memory of {tensor.device} here"
        elif not has_memory(tensor):
            cause = "a tensor without memory (freed or shrunk storage) cannot be received into"
        elif overlaps(tensor):
            cause = "a tensor with several elements in one place cannot be received into"
        elif tensor.is_conj() or tensor.is_neg():
            cause = "a lazily conjugated or negated tensor cannot be received into"
        if cause:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                cause,
                "Receive into a dense tensor on a device of the backend",
            )
        self._check_capture(tensor, operation)

    def _reaches(self, tensor: Tensor) -> bool:
        return tensor.device.type in self._host_devices or self.on_device(tensor)

    def _check_capture(self, tensor: Tensor, operation: Operation) -> None:
        if self._side is None or self._semantics.capture is Capture.ALLOWED:
            return
        if self._side.device.holds(tensor) and self._side.device.capturing():
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                f"the current stream is being captured, and backend {self._backend!r} declares "
                "capture = REFUSED",
                "Send and receive outside the captured region",
            )
