"""The gloo profile observes what real gloo observes, trace by trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gloo_traces import TRACES, follow

from commlayer.sim import FailureKind, Rank, World, profile
from commlayer.sim.choices import RandomChoices, ReplayChoices

WRITES_EARLY = "bytes are read when the peer is ready"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes on real gloo observe, rank by rank."""
    path = tmp_path_factory.mktemp("gloo") / "store"
    script = Path(__file__).with_name("gloo_traces.py")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(path)],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output) for output in outputs]


def simulated(name: str, seed: int | None) -> tuple[list[list[Any]], World]:
    seen: list[list[Any]] = [[], []]
    choices = ReplayChoices() if seed is None else RandomChoices(seed)
    world = World(choices, profile("gloo"))

    def body(rank: Rank) -> None:
        flag, peer = rank.endpoint("sync"), 1 - rank.index

        def sync() -> None:
            import torch

            mine, theirs = torch.zeros(1), torch.zeros(1)
            works = [flag.isend(mine, peer), flag.irecv(theirs, peer)]
            for work in works:
                work.wait()
            rank.sleep(1.0)

        seen[rank.index] = follow(
            TRACES[name][rank.index],
            rank.index,
            rank.endpoint("data"),
            lambda work: work.wait(),
            sync,
        )

    try:
        world.start(2, body)
        world.run()
    finally:
        world.close()
    return seen, world


@pytest.mark.parametrize("name", [name for name in TRACES if name != WRITES_EARLY])
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_same_observations(name: str, seed: int | None, real: list[dict[str, Any]]) -> None:
    seen, world = simulated(name, seed)
    assert world.failure is None, str(world.failure)
    assert json.loads(json.dumps(seen)) == [rank[name] for rank in real]


def test_an_overwrite_that_real_gloo_delivers_is_a_failure_here(
    real: list[dict[str, Any]],
) -> None:
    assert real[1][WRITES_EARLY] == [["r", [9] * 8]]
    _, world = simulated(WRITES_EARLY, None)
    assert world.failure is not None
    assert world.failure.kind is FailureKind.OVERWRITTEN
