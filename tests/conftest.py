"""Fixtures for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks.pool import Ranks


# Torch's store asks for the name of each address that connects to it.  Where a name server
# loses the question, its connections, and all that wait for one, stand still: 5 s by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_configure() -> None:
    """Generated examples have no time limit of their own: a machine may be busy."""
    if find_spec("hypothesis"):  # environments for one engine do without
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "commlayer", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("commlayer")


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
