"""Topologies as options of commands."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer.pipeline.topology import Topology


class Shape(str, Enum):
    """A topology by name."""

    LINEAR = "linear"
    FOLDED = "folded"

    def of(self, ranks: int, virtual_stages: int = 2) -> Topology:
        """The topology of this shape; only a folded one has virtual stages."""
        from commlayer.pipeline.topology import FoldedTopology, LinearTopology

        if self is Shape.LINEAR:
            return LinearTopology(ranks)
        return FoldedTopology(ranks, virtual_stages)
