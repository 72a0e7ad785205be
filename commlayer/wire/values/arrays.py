"""NumPy arrays and scalars as plain values, so that they travel without pickle.

A simple dtype is its type string (``"<f4"``, ``"<M8[ns]"``); one with fields is
``(itemsize, [(name, offset, shape, dtype), ...])``.  Scalar texts have the
dtype ``"U"`` or ``"S"`` and are plain texts, because an array drops NULs at
their end.  NumPy is imported only when a value needs it.

What reads parts trusts them in nothing and raises any exception for those that
the writer cannot have made; nothing is allocated beyond a copy of the bytes.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

_SIMPLE = re.compile(r"[<>|][biufcmMSUV]\d{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")
_MAX_DIMENSIONS = 64
_MAX_EMPTY_ELEMENTS = 1 << 20


def numpy() -> Any:
    return importlib.import_module("numpy")


def array_parts(array: Any) -> tuple[Any, ...]:
    """Return dtype, shape and bytes.  Raises `ValueError` for a dtype that cannot be told."""
    return _describe(array.dtype), array.shape, array.tobytes()


def array_of(description: Any, shape: Any, data: Any) -> Any:
    """Return a writable array."""
    dtype, shape = _dtype(description), _shape(shape)
    size = math.prod(shape) * dtype.itemsize
    if type(data) is not bytes or size != len(data):
        raise ValueError(f"{size} bytes are expected")
    if dtype.itemsize == 0 and math.prod(shape) > _MAX_EMPTY_ELEMENTS:
        raise ValueError("too many elements without a size")
    return numpy().ndarray(shape, dtype, bytearray(data))


def scalar_parts(scalar: Any) -> tuple[Any, ...]:
    """Return dtype and bytes or text.  Raises `ValueError` for a dtype that cannot be told."""
    np = numpy()
    if type(scalar) is np.str_:
        return "U", str.__str__(scalar)  # NumPy's own drops NULs at the end
    if type(scalar) is np.bytes_:
        return "S", bytes(scalar)
    return _describe(scalar.dtype), scalar.tobytes()


def scalar_of(description: Any, data: Any) -> Any:
    if description == "U" and type(data) is str:
        return numpy().str_(data)
    if description == "S" and type(data) is bytes:
        return numpy().bytes_(data)
    return array_of(description, (), data)[()]


def _describe(dtype: Any) -> Any:
    np = numpy()
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype} holds Python objects")
    if dtype.names is None:
        if not _SIMPLE.fullmatch(dtype.str) or np.dtype(dtype.str) != dtype:
            raise ValueError(f"dtype {dtype} is not one of NumPy's own")
        return dtype.str
    if dtype.type is not np.void:
        raise ValueError(f"dtype {dtype} has a scalar type of its own")
    fields = []
    for name in dtype.names:
        field, offset, *title = dtype.fields[name]
        if title:
            raise ValueError(f"field {name!r} of dtype {dtype} has a title")
        fields.append((name, offset, field.shape, _describe(field.base)))
    return dtype.itemsize, fields


def _dtype(description: Any) -> Any:
    np = numpy()
    if type(description) is str:
        if not _SIMPLE.fullmatch(description):
            raise ValueError(f"{description[:32]!r} is not a simple dtype")
        return np.dtype(description)
    itemsize, fields = description
    names, offsets, formats = [], [], []
    for name, offset, shape, base in fields:
        names.append(name)
        offsets.append(offset)
        formats.append((_dtype(base), _shape(shape)) if shape else _dtype(base))
    return np.dtype({"names": names, "offsets": offsets, "formats": formats, "itemsize": itemsize})


def _shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("the shape is not a tuple of few extents")
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise ValueError("the shape has an impossible extent")
    return shape
