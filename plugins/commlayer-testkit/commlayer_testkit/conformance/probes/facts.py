"""The names of all facts."""

from __future__ import annotations

from commlayer.semantics import OperationSemantics, Semantics

P2P, COLLECTIVE = "p2p", "collective"


def fact_names() -> list[str]:
    """Every fact by full name, in the order of a report."""
    operations = OperationSemantics.__struct_fields__
    whole = [name for name in Semantics.__struct_fields__ if name not in (P2P, COLLECTIVE)]
    return [*(f"{kind}.{name}" for kind in (P2P, COLLECTIVE) for name in operations), *whole]
