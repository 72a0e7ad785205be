"""Plan a benchmark, run it, and collect its results."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence

from commlayer_testkit.ports import free_port

from commlayer_bench.contenders import MPI, mpi
from commlayer_bench.job import Away, Job, Progress, Rows
from commlayer_bench.launch import run_ranks
from commlayer_bench.machine import this_machine
from commlayer_bench.records import SCHEMA, Absent, Results, Row
from commlayer_bench.workload import Scale
from commlayer_bench.workloads import WORKLOADS


def run(
    workloads: Sequence[str],
    contenders: Sequence[str],
    *,
    rounds: int,
    scale: Scale,
    progress: Callable[[str], None] = lambda doing: None,
) -> Results:
    """Run `workloads` with `contenders`, each comparison in one run of the same processes.

    Two ranks are started by ``mpiexec`` if contenders need it.  More than two are not,
    because ranks that wait inside MPI would keep the processor from the others.
    Raises `CommError` when a rank fails.
    """
    load = os.getloadavg()[0]
    rows: list[Row] = []
    absent: dict[str, Absent] = {}
    for ranks, names in _by_world(workloads, scale).items():
        job = Job(
            ranks=ranks,
            port=free_port(),
            workloads=tuple(names),
            contenders=tuple(contenders) if ranks > 1 else (),
            rounds=rounds,
            scale=scale.value,
        )
        launcher = mpi.launcher(ranks) if ranks == 2 and set(MPI) & set(contenders) else ()
        for message in run_ranks(job, launcher):
            if isinstance(message, Progress):
                progress(f"{message.workload}, {message.case}")
            elif isinstance(message, Rows):
                rows.extend(message.rows)
            elif isinstance(message, Away):
                absent.setdefault(message.absent.contender, message.absent)
    return Results(
        schema=SCHEMA,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        rounds=rounds,
        scale=scale.value,
        load=load,
        machine=this_machine(),
        rows=tuple(rows),
        absent=tuple(absent.values()),
    )


def _by_world(workloads: Sequence[str], scale: Scale) -> dict[int, list[str]]:
    """What is run on how many ranks; two first."""
    plan: dict[int, list[str]] = {}
    for name in workloads:
        for ranks in WORKLOADS[name].worlds(scale):
            plan.setdefault(ranks, []).append(name)
    return plan
