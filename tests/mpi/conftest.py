"""Tests of the mpi backend run where mpi4py, an MPI library and ``mpiexec`` are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_job import Jobs

from commlayer.errors import CommError


@pytest.fixture(scope="session")
def needs_mpi() -> None:
    """Skips where MPI programs cannot run."""
    commlayer_mpi = pytest.importorskip("commlayer_mpi", reason="commlayer-mpi is not installed")
    backend = commlayer_mpi.MpiBackend()
    viability = backend.viability()
    if not viability.ok:
        pytest.skip(f"{viability.reason}: {viability.install}")
    try:
        backend.launcher(1)
    except CommError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mpi(needs_mpi: None) -> Iterator[Jobs]:
    """``mpi(size)`` is a job of that many ranks; see `mpi_job.Job.run`."""
    with Jobs() as jobs:
        yield jobs
