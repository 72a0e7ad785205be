"""Codes of extension tokens, and what packing and parsing share."""

from __future__ import annotations

import reprlib
import struct
from typing import Any

LIST, TUPLE, SET, FROZENSET, SIZE, DICT, OBJECT, MEMBER, TENSOR = range(1, 10)
ARRAY, SCALAR, BYTES, TEXT, INTEGER, COMPLEX, DTYPE, DEVICE, PICKLE = range(10, 19)
ENCODED = 19

COMPLEX_FORMAT = struct.Struct(">dd")


def short(value: Any) -> str:
    """A bounded representation of any value, for an error."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
