"""The checks of all rules, by level.  Importing this package registers them."""

from commlayer_testkit.conformance.checks import (
    devices,
    faults,
    native,
    processes,
    shape,
    simulated,
)

__all__ = ["devices", "faults", "native", "processes", "shape", "simulated"]
