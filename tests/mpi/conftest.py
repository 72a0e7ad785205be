"""Tests of the mpi backend run where mpi4py, an MPI library and ``mpiexec`` are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi_job import MPIEXEC, Jobs


@pytest.fixture(scope="session")
def needs_mpi() -> None:
    """Skips where MPI programs cannot run."""
    commlayer_mpi = pytest.importorskip("commlayer_mpi", reason="commlayer-mpi is not installed")
    viability = commlayer_mpi.MpiBackend().viability()
    if not viability.ok:
        pytest.skip(f"{viability.reason}: {viability.install}")
    if MPIEXEC is None:
        pytest.skip("no mpiexec: pip install 'commlayer-mpi[mpich]'")


@pytest.fixture(scope="session")
def mpi(needs_mpi: None) -> Iterator[Jobs]:
    """``mpi(size)`` is a job of that many ranks; see `mpi_job.Job.run`."""
    with Jobs() as jobs:
        yield jobs
