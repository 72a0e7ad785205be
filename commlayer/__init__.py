"""Pipeline-parallel sends and token broadcasts that mean the same on every transport."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from commlayer.bootstrap.connector import connect
    from commlayer.communicator import Communicator
    from commlayer.config import CommConfig
    from commlayer.errors import (
        Cancelled,
        Closed,
        CommError,
        CommTimeout,
        ConfigError,
        DeviceError,
        ErrorKind,
        Full,
        LifetimeError,
        OperationRef,
        PeerLost,
        PluginError,
        ProtocolError,
        UnsupportedError,
    )
    from commlayer.handle import Handle, wait_all, wait_any
    from commlayer.hooks import hookimpl
    from commlayer.progress.reaping import ReapingPolicy
    from commlayer.progress.retention import RetentionPolicy
    from commlayer.semantics import Semantics
    from commlayer.wire.values import register

__all__ = [
    "Cancelled",
    "Closed",
    "CommConfig",
    "CommError",
    "CommTimeout",
    "Communicator",
    "ConfigError",
    "DeviceError",
    "ErrorKind",
    "Full",
    "Handle",
    "LifetimeError",
    "OperationRef",
    "PeerLost",
    "PluginError",
    "ProtocolError",
    "ReapingPolicy",
    "RetentionPolicy",
    "Semantics",
    "UnsupportedError",
    "connect",
    "hookimpl",
    "register",
    "wait_all",
    "wait_any",
]

_MODULES = {
    "Cancelled": "commlayer.errors",
    "Closed": "commlayer.errors",
    "CommConfig": "commlayer.config",
    "CommError": "commlayer.errors",
    "CommTimeout": "commlayer.errors",
    "Communicator": "commlayer.communicator",
    "ConfigError": "commlayer.errors",
    "DeviceError": "commlayer.errors",
    "ErrorKind": "commlayer.errors",
    "Full": "commlayer.errors",
    "Handle": "commlayer.handle",
    "LifetimeError": "commlayer.errors",
    "OperationRef": "commlayer.errors",
    "PeerLost": "commlayer.errors",
    "PluginError": "commlayer.errors",
    "ProtocolError": "commlayer.errors",
    "ReapingPolicy": "commlayer.progress.reaping",
    "RetentionPolicy": "commlayer.progress.retention",
    "Semantics": "commlayer.semantics",
    "UnsupportedError": "commlayer.errors",
    "connect": "commlayer.bootstrap.connector",
    "hookimpl": "commlayer.hooks",
    "register": "commlayer.wire.values",
    "wait_all": "commlayer.handle",
    "wait_any": "commlayer.handle",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the commands start without torch."""
    if name == "__version__":
        from commlayer.versions import installed_version

        globals()[name] = installed_version()
        return globals()[name]
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
