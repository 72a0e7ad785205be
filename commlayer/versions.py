"""The version of the library, which is said in one place only: its distribution."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def installed_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("commlayer")
    except PackageNotFoundError:
        return "not installed"
