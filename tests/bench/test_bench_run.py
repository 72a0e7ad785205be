"""The benchmark over real processes: every row is there, and says something possible."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from commlayer_bench.contenders import CONTENDERS, MPI, mpi
from commlayer_bench.contenders.commlayer import MODES, known
from commlayer_bench.job import Job
from commlayer_bench.launch import run_ranks
from commlayer_bench.records import Results, decode
from commlayer_bench.run import run
from commlayer_bench.workload import Scale
from commlayer_bench.workloads import WORKLOADS
from commlayer_testkit.ports import free_port

from commlayer.errors import CommError

OURS = [name for name in MODES if known(name)]
TORCH = ["plain", "common", "object_list"]
DICTS = {*TORCH, *OURS}
BY_WORKLOAD = {
    "tensor": {"plain", *OURS},
    "object": DICTS,
    "dict": DICTS,
    "broadcast": DICTS,
    "post": DICTS,
    "late": DICTS,
    "overlap": DICTS,
    "in_flight": {"plain", *OURS},
    "tensors": DICTS,
    "schemas": DICTS,
    "peers": DICTS,
    "handle": set(OURS),
    "import": {"commlayer"},
    "observing": {"everything off", "everything on"},
    "breakdown": {"plain", *OURS},
}
ROUNDS = 1
MAY_BE_ZERO = {"payload", "sends", "receives"}


def measure(workloads: list[str], contenders: list[str], rounds: int = ROUNDS) -> Results:
    return run(workloads, contenders, rounds=rounds, scale=Scale.tiny)


@pytest.fixture(scope="module")
def results() -> Results:
    return measure(list(WORKLOADS), [*TORCH, *MODES])


def test_every_workload_is_expected():
    assert set(BY_WORKLOAD) == set(WORKLOADS)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_are_complete(results, name):
    workload = WORKLOADS[name]
    cases = [c.label for n in workload.worlds(Scale.tiny) for c in workload.cases(Scale.tiny, n)]
    rows = [row for row in results.rows if row.workload == name]
    found = Counter((row.case, row.contender, row.metric) for row in rows)
    metrics = {"all", "post returns"} if name == "breakdown" else set(workload.metrics)
    for case in cases:
        for contender in BY_WORKLOAD[name]:
            for metric in workload.metrics if contender in OURS else metrics:
                assert found.pop((case, contender, metric)) == 1
    assert not found


@pytest.mark.timeout(300)
def test_samples_are_sane(results):
    for row in results.rows:
        assert len(row.samples) == ROUNDS
        assert row.unit == WORKLOADS[row.workload].metrics[row.metric]
        for sample in row.samples:
            assert math.isfinite(sample)
            assert sample > 0 or row.metric in MAY_BE_ZERO
        if row.unit == "s":
            assert max(row.samples) < 60


@pytest.mark.timeout(300)
def test_the_parts_of_a_message_do_not_exceed_the_whole(results):
    rows = {
        (row.contender, row.metric): row.samples
        for row in results.rows
        if row.workload == "breakdown"
    }
    for name in OURS:
        whole = sum(rows[name, "all"])
        for part in ("encode", "header", "payload", "hand over"):
            assert sum(rows[name, part]) <= whole


@pytest.mark.timeout(300)
def test_contenders_that_cannot_run_are_named_with_a_reason(results):
    unknown = {name for name in MODES if not known(name)}
    assert {absent.contender for absent in results.absent} == unknown
    assert all(absent.reason for absent in results.absent)


@pytest.mark.timeout(300)
def test_results_survive_json(results):
    assert decode(results.encode()) == results


def test_mpi_takes_part_where_it_is_installed():
    if not mpi.launcher(2):
        pytest.skip("mpi4py or mpiexec is not installed")
    results = measure(["dict", "object", "tensor", "broadcast"], ["plain", *MPI], rounds=1)
    assert not results.absent
    found = {(row.workload, row.contender) for row in results.rows}
    assert {("dict", "mpi pickle"), ("object", "mpi pickle")} <= found
    assert {("dict", "mpi buffer"), ("tensor", "mpi buffer"), ("broadcast", "mpi buffer")} <= found


def test_without_mpiexec_mpi_is_left_out():
    results = run(["peers"], list(MPI), rounds=1, scale=Scale.tiny)
    assert {absent.contender for absent in results.absent} == set(MPI)
    assert results.rows == ()


def test_a_rank_that_fails_is_reported_with_its_error():
    job = Job(
        ranks=2,
        port=free_port(),
        workloads=("no such workload",),
        contenders=("plain",),
        rounds=1,
        scale="tiny",
    )
    with pytest.raises(CommError, match="no such workload"):
        list(run_ranks(job))


def test_contenders_have_names_of_their_own():
    assert {"plain", "common", "object_list", "vllm", *MPI, *MODES} == set(CONTENDERS)
