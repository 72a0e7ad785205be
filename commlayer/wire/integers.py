"""Integers as callers have them: Python's, NumPy's, and whatever else is one by `__index__`."""

from __future__ import annotations

import operator
from typing import Any


def integer(value: Any) -> int | None:
    """`value` as an int; ``None`` if it is no integer, as a bool is not here."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except Exception:  # of an `__index__` that raises
        return None
