"""Scenarios by theme.  Importing this package registers them all."""

from commlayer_testkit.sim.scenarios import (
    basic,
    core,
    device,
    device_core,
    distributed,
    fast_path,
    host,
    pipeline,
    promises,
)

__all__ = [
    "basic",
    "core",
    "device",
    "device_core",
    "distributed",
    "fast_path",
    "host",
    "pipeline",
    "promises",
]
