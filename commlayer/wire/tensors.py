"""Tensors on the wire: what can be sent, its description, and its bytes.

A tensor travels as its elements in row-major order, in the byte order of the
host.  Strides, storage offset, gradient and Python subclass do not travel: a
receiver gets a plain contiguous tensor without history.
"""

from __future__ import annotations

import ctypes
import math
import re
from typing import Annotated

import msgspec
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from commlayer.config import CommConfig
from commlayer.errors import About, CommError, ErrorKind, UnsupportedError


def check_size(nbytes: int, operation: About, limits: CommConfig) -> None:
    """Raise `UnsupportedError` if so much must not be sent in one message."""
    if nbytes > limits.max_message_bytes:
        raise UnsupportedError(
            operation,
            f"{nbytes} bytes exceed max_message_bytes = {limits.max_message_bytes}",
            "Send less at once, or raise the limit on all ranks",
        )


ALL_DTYPES: dict[str, torch.dtype] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
"""Every dtype of the running torch by its canonical name."""

_SUB_BYTE_OR_QUANTIZED = re.compile(r"u?int[1-7]|bits\w+|q\w+")

DTYPES = {
    name: dtype for name, dtype in ALL_DTYPES.items() if not _SUB_BYTE_OR_QUANTIZED.fullmatch(name)
}
"""The dtypes that a sent tensor may have."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DEVICE_TYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**63 - 1


_READ = 0x100
"""``PyBUF_READ`` of Python's C API."""
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class TensorMeta(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Dtype by canonical name, shape, and type of the sender's device (without index).

    Decoding checks types and the number of dimensions only; call `check` before
    anything else is used.
    """

    dtype: str
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=_MAX_DIMENSIONS)]
    device: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def check(self, limits: CommConfig, operation: About) -> None:
        """Raise `CommError` (PROTOCOL) unless a tensor of this kind may be allocated."""
        if self.dtype not in DTYPES:
            raise CommError(
                ErrorKind.PROTOCOL,
                operation,
                f"the message has a tensor of dtype {self.dtype[:32]!r}, which this rank's torch "
                f"{torch.__version__} does not have",
                "Run the same version of torch on all ranks",
            )
        if not _DEVICE_TYPE.fullmatch(self.device):
            raise _malformed(operation, f"the device type {self.device[:32]!r} is not a name")
        if len(self.shape) > _MAX_DIMENSIONS:
            raise _malformed(
                operation, f"{len(self.shape)} dimensions exceed the {_MAX_DIMENSIONS} accepted"
            )
        # The extent without zeros is bounded as well, because strides are computed from it.
        if min(self.shape, default=0) < 0 or (
            math.prod(filter(None, self.shape)) * DTYPES[self.dtype].itemsize > _MAX_ELEMENTS
        ):
            raise _malformed(operation, f"the shape {self.shape} is impossible")
        if self.nbytes > limits.max_message_bytes:
            raise _malformed(
                operation,
                f"a tensor of {self.nbytes} bytes exceeds "
                f"max_message_bytes = {limits.max_message_bytes}",
            )


def meta_of(tensor: Tensor) -> TensorMeta:
    """Describe a `sendable` tensor."""
    return TensorMeta(_NAMES[tensor.dtype], tuple(tensor.shape), tensor.device.type)


def in_memory(tensor: Tensor, operation: About) -> Tensor:
    """Return `tensor` without its Python subclass, sharing its memory.

    Raises `CommError` (UNSUPPORTED) for what has no dense memory of its own:
    sparse, quantized, nested, meta, fake and lazy tensors, tensors inside a
    transform, and subclasses that wrap other tensors.
    """
    if type(tensor) is not Tensor:
        tensor = _without_subclass(tensor, operation)
    if not _is_dense(tensor):
        raise _refusal(tensor, operation)
    return tensor


def sendable(tensor: Tensor, operation: About, limits: CommConfig) -> Tensor:
    """Return `tensor` as a plain, detached, contiguous tensor on the same device.

    The result shares memory with `tensor` unless that is non-contiguous or a
    lazy conjugate or negative, which are copied.  Raises `CommError`
    (UNSUPPORTED) as `in_memory` does, and for what cannot be copied.
    """
    tensor = in_memory(tensor, operation)
    if tensor.requires_grad:
        tensor = tensor.detach()
    if is_lazy_view(tensor) or not tensor.is_contiguous():
        tensor = _copy(tensor, operation, limits)
    return tensor


def _copy(tensor: Tensor, operation: About, limits: CommConfig) -> Tensor:
    check_size(tensor.nbytes, operation, limits)
    try:
        return tensor.resolve_conj().resolve_neg().contiguous()
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation,
            f"torch {torch.__version__} cannot make a tensor of {tensor.dtype} contiguous "
            f"({reason})",
            "Send a contiguous tensor",
        ) from error


def is_plain(value: object) -> bool:
    """Whether `value` is a tensor in host memory that `sendable` returns as it is.

    Cheaper than that, and False where in doubt.
    """
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_nested
        and not value.requires_grad
        and not value.is_conj()
        and not value.is_neg()
        and value.is_contiguous()
        and value.is_cpu
        and value.dtype in _NAMES
        and has_memory(value)
    )


def plain_alias(tensor: Tensor) -> Tensor:
    """`tensor` without its Python subclass, none of whose code runs."""
    if type(tensor) is Tensor:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor without history as one-dimensional ``uint8``, sharing its memory."""
    # `view(-1)` keeps the stride of a single element, which `view(torch.uint8)` then refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_lazy_view(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` holds the conjugates or negatives of its elements."""
    return tensor.is_conj() or tensor.is_neg()


def overlaps(tensor: Tensor) -> bool:
    """Whether elements of a strided tensor may share memory.

    True for an expanded tensor and for every other whose strides do not exceed
    what the dimensions inside them span.
    """
    span = 1
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in strides if size > 1):
        if stride < span:
            return tensor.numel() > 0
        span += stride * (size - 1)
    return False


def from_meta(meta: TensorMeta, device: torch.device | str) -> Tensor:
    """Allocate an uninitialised contiguous tensor on `device`; `meta` was checked."""
    return torch.empty(meta.shape, dtype=DTYPES[meta.dtype], device=device)


def _is_dense(tensor: Tensor) -> bool:
    return (
        tensor.dtype in _NAMES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_meta
        and has_memory(tensor)
    )


def _without_subclass(tensor: Tensor, operation: About) -> Tensor:
    kind = type(tensor)
    if not isinstance(tensor, Tensor):
        raise CommError(
            ErrorKind.UNSUPPORTED, operation, f"a {kind.__name__} is not a tensor", "Pass a tensor"
        )
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation,
            f"a tensor of type {kind.__module__}.{kind.__qualname__} has no plain memory",
            "Use the plain tensor behind it (a DTensor's `to_local()`)",
        )
    if is_lazy(tensor):
        raise CommError(
            ErrorKind.UNSUPPORTED, operation, "a lazy tensor has no data yet", "Initialise it first"
        )
    return plain_alias(tensor)


def _refusal(tensor: Tensor, operation: About) -> CommError:
    if tensor.is_meta:
        cause, cure = "a meta tensor has no data", "Use a tensor that has"
    elif tensor.is_nested:
        cause, cure = "a nested tensor has no single shape", "Use its components (`unbind()`)"
    elif tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        cause, cure = f"a tensor of layout {layout} is not dense", "Use `tensor.to_dense()`"
    elif tensor.dtype not in _NAMES:
        cause = f"a tensor of {tensor.dtype} has no byte per element"
        cure = "Use `tensor.int_repr()` and its scale" if tensor.is_quantized else "Convert it"
    else:
        cause = "the tensor has no memory (freed or shrunk storage, or a functorch transform)"
        cure = "Use it while its storage exists, outside of vmap, grad and functionalize"
    return CommError(ErrorKind.UNSUPPORTED, operation, cause, cure)


def _malformed(operation: About, cause: str) -> CommError:
    return CommError(
        ErrorKind.PROTOCOL,
        operation,
        f"the message describes an impossible tensor: {cause}",
        "Check that both ranks run the same version and limits",
    )


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
        span = tensor.nbytes if tensor.is_contiguous() else _span(tensor)
        return tensor.data_ptr() + span <= begin + storage.nbytes()
    except RuntimeError:
        return False


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not empty, for as long as that lives."""
    view: memoryview = _memory_at(tensor.data_ptr(), tensor.nbytes, _READ)
    return view
