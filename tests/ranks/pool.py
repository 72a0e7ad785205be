"""`commlayer_testkit.conformance.ranks.pool`, with what these tests need imported already."""

from __future__ import annotations

from commlayer_testkit.conformance.ranks import pool
from commlayer_testkit.conformance.ranks.pool import Process, RankFailure, collect

__all__ = ["Process", "RankFailure", "Ranks", "collect"]


class Ranks(pool.Ranks):
    """Ranks that find pytest and the gloo plugin imported."""

    def __init__(self) -> None:
        super().__init__(["pytest", "commlayer_gloo"])
