"""The lifetime checker: was a source overwritten while its send was in flight?"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Fingerprint:
    """The state of source tensors when they were posted.

    Compares bytes by checksum, since version counters miss writes through
    ``.data``, through `numpy` and by kernels, and raise on inference tensors.
    Reads host memory only: tensors on a device are not checked.
    """

    __slots__ = ("_sums", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        self._sums = [_checksum(tensor) for tensor in self._tensors]

    def changed(self) -> bool:
        """True if any byte differs from when it was taken (CRC-32 collisions aside)."""
        return [_checksum(tensor) for tensor in self._tensors] != self._sums


def _checksum(tensor: Tensor) -> int:
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return 0
    return zlib.crc32((ctypes.c_char * nbytes).from_address(tensor.data_ptr()))
