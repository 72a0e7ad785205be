"""File descriptors: what to say when a process has none left, and how to find out in time."""

from __future__ import annotations

import errno
import os

from commlayer.errors import CommError, ConfigError

_NUMBERS = (errno.EMFILE, errno.ENFILE)
_SIGNS = ("EMFILE", "ENFILE", "oo many open files")
"""Native code says it in words alone."""


def out_of_descriptors(operation: str, error: BaseException) -> CommError | None:
    """The error to raise if `error` says that no file descriptor is left, else ``None``."""
    said = any(sign in str(error) for sign in _SIGNS)
    if getattr(error, "errno", None) not in _NUMBERS and not said:
        return None
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        operation,
        f"this process has too few file descriptors ({first_line})",
        "Raise the limit (ulimit -n)",
    )


def need_descriptors(operation: str, count: int) -> None:
    """Raise `CommError` unless the process can open `count` more descriptors now.

    For native code that ends the process when it has none left.
    """
    opened = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        failure = out_of_descriptors(operation, error)
        if failure is not None:
            raise failure from error
    finally:
        for each in opened:
            os.close(each)
