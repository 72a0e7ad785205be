"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks.pool import Ranks


@pytest.fixture(scope="session")
def _ranks() -> Iterator[Ranks]:
    from ranks.pool import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(_ranks: Ranks) -> Iterator[Ranks]:
    """Runs functions as the ranks of a job; see `ranks.pool.Ranks`."""
    yield _ranks
    _ranks.end_processes()
