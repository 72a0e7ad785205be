"""Pipeline-parallel sends and token broadcasts that mean the same on every transport."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.bootstrap.connector import connect
    from commlayer.communicator import Communicator
    from commlayer.config import CommConfig
    from commlayer.errors import CommError, CommTimeout, ErrorKind
    from commlayer.handle import Handle
    from commlayer.hooks import hookimpl
    from commlayer.progress.reaping import ReapingPolicy
    from commlayer.progress.retention import RetentionPolicy
    from commlayer.semantics import Semantics
    from commlayer.wire.values import register

__all__ = [
    "CommConfig",
    "CommError",
    "CommTimeout",
    "Communicator",
    "ErrorKind",
    "Handle",
    "ReapingPolicy",
    "RetentionPolicy",
    "Semantics",
    "connect",
    "hookimpl",
    "register",
]

_MODULES = {
    "CommConfig": "commlayer.config",
    "CommError": "commlayer.errors",
    "CommTimeout": "commlayer.errors",
    "Communicator": "commlayer.communicator",
    "ErrorKind": "commlayer.errors",
    "Handle": "commlayer.handle",
    "ReapingPolicy": "commlayer.progress.reaping",
    "RetentionPolicy": "commlayer.progress.retention",
    "Semantics": "commlayer.semantics",
    "connect": "commlayer.bootstrap.connector",
    "hookimpl": "commlayer.hooks",
    "register": "commlayer.wire.values",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the commands start without torch."""
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
