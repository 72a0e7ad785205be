"""Limits of time, as callers give them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from numbers import Real


class Deadline:
    """The end of a wait that may last `seconds` from now; ``None`` for one without end.

    `now` is the clock of the runtime, so that simulated time counts where time is simulated.
    """

    __slots__ = ("_at", "_now")

    def __init__(self, now: Callable[[], float], seconds: float | None) -> None:
        self._now = now
        self._at = None if seconds is None else now() + seconds

    def remaining(self) -> float | None:
        """Seconds that are left, at least 0; ``None`` without end."""
        return None if self._at is None else max(0.0, self._at - self._now())

    def expired(self) -> bool:
        """True once no time is left."""
        return self._at is not None and self._now() >= self._at


def checked_timeout(timeout: float | None) -> float | None:
    """`timeout` in seconds; raises `ValueError` for a negative number, NaN or no number."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real):  # NumPy's numbers are such
        raise ValueError(f"timeout must be a number of seconds or None, not {timeout!r}")
    if timeout < 0 or timeout != timeout:
        raise ValueError(f"timeout must not be negative or NaN, got {timeout!r}")
    # Compared as it is: an integer may be too large for a float.
    return float(timeout) if timeout < threading.TIMEOUT_MAX else None
