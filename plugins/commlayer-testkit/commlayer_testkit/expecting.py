"""What a call must end with: an error of a kind, or a limit that expires."""

from __future__ import annotations

from collections.abc import Callable

from commlayer.errors import CommError, CommTimeout, ErrorKind

PREMATURE = 0.3
"""Seconds in which a completion that comes too early shows, on a busy machine too."""


def expect_error(kind: ErrorKind, call: Callable[[], object]) -> CommError:
    """The error of that kind that `call` raises."""
    raised: CommError | None = None
    try:
        call()
    except CommError as error:
        raised = error
    assert raised is not None, f"nothing was raised where {kind.value} was expected"
    assert raised.kind is kind, f"expected {kind.value}, got {raised.kind.value}: {raised}"
    return raised


def expires(wait: Callable[[float], object], limit: float = PREMATURE) -> bool:
    """Whether a wait of `limit` seconds is in vain."""
    try:
        wait(limit)
    except CommTimeout:
        return True
    return False
