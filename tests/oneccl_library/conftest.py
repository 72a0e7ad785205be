"""Tests on oneCCL's own library: ``make test-oneccl`` fetches it and runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from oneccl_library import library

if TYPE_CHECKING:
    from ranks.pool import Ranks


@pytest.fixture(scope="session", autouse=True)
def oneccl() -> Iterator[None]:
    """The library's variables, for every process that is started from here on."""
    folder = os.environ.get(library.FOLDER)
    if folder is None:
        pytest.skip("oneCCL's own library is not here: make test-oneccl")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in library.environment(folder).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def _ranks(oneccl: None) -> Iterator[Ranks]:
    """A pool of this folder's own: its processes start with the library's variables."""
    from ranks.pool import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()
