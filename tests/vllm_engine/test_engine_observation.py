"""Stall reports and figures of the library, seen through the engine's own log and registry."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import groups
import torch
from prometheus_client import values
from ranks import here
from ranks.pool import Ranks, collect
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.v1.metrics import prometheus

STEPS = 3


def a_stage_that_does_not_send() -> None:
    configure_logging(LoggingConfig())  # as each of the engine's workers does
    group = groups.pipeline()
    comm = groups.installed(group, stall_timeout=0.4).wire.comm  # type: ignore[attr-defined]
    if group.rank_in_group == 1:
        _, (received,), _ = group.irecv_tensor_dict()
        pause = threading.Event()
        while comm.last_report is None:
            pause.wait(0.01)
        here.meet("reported")
        received.wait(20)
    else:
        here.meet("reported")
        group.send_tensor_dict({"step": 3})
    groups.end(group)


def test_a_stall_is_reported_where_the_engine_logs(ranks: Ranks) -> None:
    processes = ranks.spawn(a_stage_that_does_not_send, 2)
    collect(processes)
    lines = [line for line in processes[1].output.splitlines() if "observation.py" in line]
    assert "WARNING" in lines[0]
    assert "commlayer report (connection commlayer, rank 1 of 2)" in lines[0]


def with_figures(folder: str) -> None:
    """Wait until the engine's registry has what both stages have done."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.get_value_class()
    group = groups.pipeline()
    groups.installed(group, metrics=True, stall_timeout=0.4)
    registry = prometheus.get_prometheus_registry()

    def served(rank: int, direction: str) -> float | None:
        labels = {"connection": "commlayer", "backend": "gloo", "channel": "data"}
        found: float | None = registry.get_sample_value(
            "commlayer_operations_completed_total",
            {**labels, "rank": str(rank), "peer": str(1 - rank), "direction": direction},
        )
        return found

    for _ in range(STEPS):
        if group.rank_in_group == 0:
            group.send_tensor_dict({"hidden": torch.ones(4)})
        else:
            group.recv_tensor_dict()
    pause = threading.Event()
    while (served(0, "send"), served(1, "recv")) != (STEPS, STEPS):
        pause.wait(0.01)
    here.meet("both have seen it")
    groups.end(group)


def test_the_engines_registry_has_the_figures_of_all_workers(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(with_figures, 2, str(tmp_path), timeout=60)
