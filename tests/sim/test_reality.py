"""Profiles observe what their real transports observe, trace by trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commlayer_testkit.sim import FailureKind, Rank, World, profile
from commlayer_testkit.sim.choices import RandomChoices, ReplayChoices
from traces import EAGER, GLOO, MPI, WRITES_EARLY, Trace, follow

Observed = list[dict[str, Any]]
SEEDS = [None, 1, 2, 3]


def run(*commands: list[str], folder: Path) -> Observed:
    """What two ranks observe that `commands` start, rank by rank."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        codes = [process.wait(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), f"exit codes {codes}"
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def script(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(name))]


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    folder = tmp_path_factory.mktemp("gloo")
    ranks = [[*script("gloo_traces.py"), str(folder), str(rank)] for rank in range(2)]
    return run(*ranks, folder=folder)


@pytest.fixture(scope="module")
def mpi(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    commlayer_mpi = pytest.importorskip("commlayer_mpi", reason="commlayer-mpi is not installed")
    backend = commlayer_mpi.MpiBackend()
    viability = backend.viability()
    if not viability.ok:
        pytest.skip(f"{viability.reason}: {viability.install}")
    if backend.semantics.p2p.eager_bytes != EAGER:
        pytest.skip("the profile is of another MPI library than the one here")
    folder = tmp_path_factory.mktemp("mpi")
    ranks = [*backend.launcher(2), *script("mpi_traces.py"), str(folder)]
    return run(ranks, folder=folder)


def simulated(on: str, trace: Trace, seed: int | None) -> tuple[list[Any], World]:
    seen: list[Any] = [None, None]
    choices = ReplayChoices() if seed is None else RandomChoices(seed)
    world = World(choices, profile(on))

    def body(rank: Rank) -> None:
        flag, peer = rank.endpoint("sync"), 1 - rank.index

        def sync() -> None:
            mine, theirs = torch.zeros(1), torch.zeros(1)
            works = [flag.isend(mine, peer), flag.irecv(theirs, peer)]
            for work in works:
                work.wait()
            rank.sleep(1.0)

        seen[rank.index] = follow(
            trace[rank.index], rank.index, rank.endpoint("data"), sync, lambda: rank.sleep(0.1)
        )

    try:
        world.start(2, body)
        world.run()
    finally:
        world.close()
    return seen, world


def same_observations(on: str, trace: Trace, seed: int | None, real: list[Any]) -> None:
    seen, world = simulated(on, trace, seed)
    assert world.failure is None, str(world.failure)
    assert seen == real


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in GLOO if name != WRITES_EARLY])
def test_gloo_and_its_profile_agree(name: str, seed: int | None, gloo: Observed) -> None:
    same_observations("gloo", GLOO[name], seed, [rank[name] for rank in gloo])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MPI)
def test_mpi_and_its_profile_agree(name: str, seed: int | None, mpi: Observed) -> None:
    same_observations("mpi", MPI[name], seed, [rank[name] for rank in mpi])


def test_the_mpi_profile_has_the_facts_of_the_plugin(mpi: Observed) -> None:
    """Where both declare something; the simulator also plays MPI's collectives."""
    commlayer_mpi = pytest.importorskip("commlayer_mpi")
    declared, played = commlayer_mpi.SEMANTICS.facts(), profile("mpi").semantics.facts()
    differ = {name for name, fact in declared["p2p"].items() if played["p2p"][name] != fact}
    assert differ <= {"errors_polled"}
    assert {name for name in declared if declared[name] != played[name]} <= {"p2p", "collective"}


def test_an_overwrite_that_real_gloo_delivers_is_a_failure_here(gloo: Observed) -> None:
    assert gloo[1][WRITES_EARLY] == [["r", [[9, 8]]]]
    _, world = simulated("gloo", GLOO[WRITES_EARLY], None)
    assert world.failure is not None
    assert world.failure.kind is FailureKind.OVERWRITTEN
