"""The lifetime checker: was a source overwritten while its send was in flight?"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commlayer.errors import About, CommError, ErrorKind
from commlayer.wire.tensors import bytes_of, has_memory

if TYPE_CHECKING:
    from torch import Tensor


class Fingerprint:
    """The state of source tensors when they were posted.

    Compares bytes by checksum, since version counters miss writes through
    ``.data``, through `numpy` and by kernels, and raise on inference tensors.
    Reads host memory only: tensors on a device are not checked.
    """

    __slots__ = ("_states", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        self._states = [_state(tensor) for tensor in self._tensors]

    def changed(self) -> bool:
        """True if any byte differs from when it was taken (CRC-32 collisions aside).

        Also true if the memory was freed or moved (``untyped_storage().resize_``).
        """
        return [_state(tensor) for tensor in self._tensors] != self._states


def _state(tensor: Tensor) -> tuple[int, int] | None:
    """Where the bytes are, and their checksum; ``None`` where there is no memory."""
    if not has_memory(tensor):
        return None
    return tensor.data_ptr(), zlib.crc32(bytes_of(tensor)) if tensor.nbytes else 0


def overwritten(about: About) -> CommError:
    """The error of a send whose source has changed while it was in flight."""
    return CommError(
        ErrorKind.LIFETIME,
        about,
        "a source tensor was overwritten while the send was in flight; the peer may have got "
        "either value",
        "Wait for the handle before the source is written again, or use retention = 'copy_on_post'",
    )
