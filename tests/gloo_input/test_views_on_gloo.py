"""Random layouts of source and target on real gloo."""

from __future__ import annotations

from ranks import here
from ranks.pool import Ranks
from views import exchange


def random_layouts() -> None:
    with here.connect(inline_bytes=1024, check_lifetime=True) as comm:
        exchange(comm, 150, 3000)


def test_random_layouts(ranks: Ranks) -> None:
    ranks.run(random_layouts, 2)
