"""Scenarios by theme.  Importing this package registers them all."""

from commlayer.sim.scenarios import basic, host

__all__ = ["basic", "host"]
