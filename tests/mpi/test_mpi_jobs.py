"""How ranks of MPI find each other, who is refused, and how programs end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from mpi_job import Jobs, command, meet
from ranks.pool import Ranks

import commlayer
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.registry import Registry

commlayer_mpi = pytest.importorskip("commlayer_mpi", reason="commlayer-mpi is not installed")

ENDING = """
import atexit, pathlib, sys, time
import commlayer

early, flag, closing = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3] == "close"
atexit.register(lambda: comm.rank == early and flag.touch())  # after the handlers of commlayer
comm = commlayer.connect({"backend": "mpi"})
comm.isend_object(comm.rank, 1 - comm.rank)
assert comm.recv_object(1 - comm.rank) == 1 - comm.rank
if closing:
    comm.close()
while comm.rank != early and not flag.exists():
    time.sleep(0.01)
print(f"rank {comm.rank} ends")
"""


@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize(("early", "closing"), [(0, "close"), (1, "exit")])
def test_ranks_may_end_in_any_order(early: int, closing: str, tmp_path: Path) -> None:
    done = subprocess.run(
        command(2, "-c", ENDING, str(early), str(tmp_path / "flag"), closing),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(done.stdout.splitlines()) == ["rank 0 ends", "rank 1 ends"], done.stderr
    assert (done.returncode, done.stderr) == (0, "")


def split() -> list[Any]:
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    with commlayer.connect({"backend": "mpi"}) as comm:
        comm.barrier(30)
        seen = []
        for part in (comm.split(color=rank // 2), comm.split([2, 0]) if rank != 1 else None):
            if part is not None:
                said = [
                    part.broadcast_object(rank if part.rank == src else None, src=src)
                    for src in range(part.world_size)
                ]
                part.barrier(30)
                part.close()
                seen.append((part.rank, said))
        return seen


def test_ranks_of_a_job_split_without_torch(mpi: Jobs) -> None:
    assert mpi(3).run(split) == [
        [(0, [0, 1]), (1, [2, 0])],
        [(1, [0, 1])],
        [(0, [2]), (0, [2, 0])],
    ]


AUTO = """
import commlayer

try:
    commlayer.connect()
except commlayer.CommError as error:
    print(error.cure)
"""


@pytest.mark.usefixtures("needs_mpi")
def test_without_a_backend_by_name_the_ranks_are_told_which(monkeypatch: Any) -> None:
    """Any other would take each rank for one that is alone."""
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    done = subprocess.run(command(2, "-c", AUTO), capture_output=True, text=True, timeout=60)
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stderr
    assert all("Set backend = 'mpi'" in line for line in said)


def disagree() -> tuple[ErrorKind, str]:
    from mpi4py import MPI

    with pytest.raises(CommError) as caught:
        commlayer.connect({"backend": "mpi", "inline_bytes": 1000 + MPI.COMM_WORLD.rank})
    return caught.value.kind, str(caught.value)


def test_ranks_that_disagree_are_told_what_differs(mpi: Jobs) -> None:
    for kind, text in mpi(2).run(disagree):
        assert kind is ErrorKind.CONFIG
        for part in ("rank 0", "rank 1", "inline_bytes", "1000", "1001"):
            assert part in text


def leave_rank_0_alone() -> str:
    from mpi4py import MPI

    text = ""
    if MPI.COMM_WORLD.rank == 0:
        with pytest.raises(CommTimeout) as caught:
            commlayer.connect({"backend": "mpi", "name": "alone", "connect_timeout": 0.2})
        text = str(caught.value)
    meet()
    with commlayer.connect({"backend": "mpi", "name": "together"}) as comm:
        assert comm.broadcast_object(text, src=0) is not None
    return text


def test_an_absent_rank_is_named_and_can_come_later(mpi: Jobs) -> None:
    text, _ = mpi(2).run(leave_rank_0_alone)
    assert "rank 1 of 2 did not connect within 0.2 s" in text


def connect_a_subgroup(rendezvous: str) -> Any:
    from mpi4py import MPI

    rank = 2 - MPI.COMM_WORLD.rank
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=3)
    try:
        group = dist.new_group([0, 2])
        received = None
        if rank != 1:
            with commlayer.connect({"backend": "mpi"}, group=group) as comm:
                comm.isend_object((rank, comm.rank), 1 - comm.rank)
                received = comm.recv_object(1 - comm.rank)
        with commlayer.connect({"backend": "mpi"}) as comm:
            assert (comm.rank, comm.world_size) == (rank, 3)
            assert comm.broadcast_object(rank, src=1) == 1
        return received
    finally:
        dist.destroy_process_group()


def test_ranks_of_a_torch_group_keep_their_numbers(mpi: Jobs, tmp_path: Path) -> None:
    assert mpi(3).run(connect_a_subgroup, str(tmp_path / "store")) == [(0, 0), None, (2, 1)]


def refused(**settings: Any) -> str:
    with pytest.raises(CommError) as caught:
        commlayer.connect({"backend": "mpi", **settings})
    return str(caught.value)


def refused_with(setting: str, value: Any) -> str:
    import mpi4py

    setattr(mpi4py.rc, setting, value)
    return refused()


@pytest.mark.usefixtures("needs_mpi")
def test_ranks_of_another_launcher_are_told_to_use_mpiexec(ranks: Ranks) -> None:
    for text in ranks.run(refused, 2):
        assert "the 2 ranks are not of one MPI job" in text
        assert "mpiexec -n 2" in text


@pytest.mark.usefixtures("needs_mpi")
@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("thread_level", "funneled", "less than MPI_THREAD_MULTIPLE"),
        ("initialize", False, "MPI is not initialised"),
    ],
)
def test_an_mpi_that_may_not_be_used_is_refused(
    ranks: Ranks, setting: str, value: Any, said: str
) -> None:
    (text,) = ranks.run(refused_with, 1, setting, value)
    assert said in text


def test_an_unknown_option_is_named(mpi: Jobs) -> None:
    for text in mpi(2).run(refuse_an_option):
        assert "unknown speed" in text


def refuse_an_option() -> str:
    return refused(options={"speed": "high"})


def survey() -> tuple[bool, str, bool]:
    (entry,) = [entry for entry in Registry().survey() if entry.name == "mpi"]
    return entry.viable, f"{entry.reason}; {entry.install}", "mpi4py.MPI" in sys.modules


@pytest.mark.usefixtures("needs_mpi")
def test_listing_backends_does_not_initialise_mpi(ranks: Ranks) -> None:
    ((viable, _, imported),) = ranks.run(survey, 1)
    assert (viable, imported) == (True, False)


@pytest.mark.usefixtures("needs_mpi")
def test_without_an_mpi_library_the_reason_and_the_cure_are_said(ranks: Ranks) -> None:
    ((viable, text, _),) = ranks.run(survey, 1, environment={"MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert not viable
    assert "cannot load MPI library" in text
    assert "pip install 'commlayer-mpi[mpich]'" in text


def test_without_mpi4py_the_reason_and_the_cure_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    viability = commlayer_mpi.MpiBackend().viability()
    assert not viability.ok
    assert viability.reason == "mpi4py is not installed"
    assert viability.install == "pip install 'commlayer-mpi[mpich]'"
