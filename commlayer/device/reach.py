"""Which memory a backend reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation
from commlayer.semantics import Capture, Semantics
from commlayer.wire.tensors import in_memory, overlaps


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
        plain = in_memory(tensor, operation.describe())
        cause = ""
        if not self._reaches(plain):
            cause = f"backend {self._backend!r} does not write memory of {plain.device} here"
        elif overlaps(plain):
            cause = "a tensor with several elements in one place cannot be received into"
        if cause:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                cause,
                "Receive into a dense tensor on a device of the backend",
            )
        self._check_capture(plain, operation)

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
