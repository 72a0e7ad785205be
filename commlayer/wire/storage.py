"""The memory behind a tensor: whether it is there, and its bytes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_READ = 0x100
"""``PyBUF_READ`` of Python's C API."""
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage of a strided tensor holds all its elements.

    It does not once it was freed or shrunk under the tensor
    (``untyped_storage().resize_``), nor inside a functorch transform.
    """
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin == 0:
            return tensor.numel() == 0
        return tensor.data_ptr() + _span(tensor) <= begin + storage.nbytes()
    except RuntimeError:
        return False


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not empty, for as long as that lives."""
    view: memoryview = _memory_at(tensor.data_ptr(), tensor.nbytes, _READ)
    return view
