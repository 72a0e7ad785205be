"""Limits of time, as callers give them."""

from __future__ import annotations

import threading


def checked_timeout(timeout: float | None) -> float | None:
    """`timeout` in seconds; raises `ValueError` for a negative number, NaN or no number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise ValueError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if timeout < 0 or timeout != timeout:
        raise ValueError(f"timeout must not be negative or NaN, got {timeout!r}")
    return float(timeout) if timeout < threading.TIMEOUT_MAX else None
