"""Who connects with whom: groups, meshes, ranks that the caller counts, one rank alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks
from torch.distributed.device_mesh import init_device_mesh

import commlayer
from commlayer import CommError, Communicator, ErrorKind

CONFIG: dict[str, Any] = {"backend": "gloo", "connect_timeout": 40.0}
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in (*VARIABLES, *LAUNCHERS):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def two_groups_of_the_same_members(together: bool) -> dict[str, str]:
    """Rank 1 connects them in the other order; what each communicator gets."""
    dist.init_process_group("gloo")
    groups = {"prefill": dist.new_group([0, 1]), "decode": dist.new_group([0, 1])}
    order = list(groups) if dist.get_rank() == 0 else list(reversed(groups))
    comms: dict[str, Communicator] = {}

    def connect(name: str) -> None:
        comms[name] = commlayer.connect(CONFIG, group=groups[name])

    if together:
        first = threading.Thread(target=connect, args=order[:1])
        first.start()
        connect(order[1])
        first.join()
    else:
        for name in groups:
            connect(name)
    other = 1 - dist.get_rank()
    for name in order:
        comms[name].isend_object(f"of {name}", dst=other)
    got = {name: comms[name].irecv_object(src=other).result(20) for name in groups}
    for comm in comms.values():
        comm.close()
    dist.destroy_process_group()
    return got


@pytest.mark.parametrize("together", [True, False], ids=["in threads", "one after another"])
def test_groups_of_the_same_members_do_not_cross(ranks: Ranks, together: bool) -> None:
    for got in ranks.run(two_groups_of_the_same_members, 2, together, timeout=90):
        assert got == {"prefill": "of prefill", "decode": "of decode"}


def crossing() -> str:
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    with pytest.raises(CommError) as caught:
        commlayer.connect({**CONFIG, "connect_timeout": 12.0}, group=groups[dist.get_rank()])
    assert caught.value.kind is ErrorKind.CONFIG
    here.meet("refused")
    return str(caught.value)


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_so(ranks: Ranks) -> None:
    for rank, text in enumerate(ranks.run(crossing, 2, timeout=90)):
        assert f"rank {rank} (pid" in text
        assert f"waits for rank {1 - rank} (pid" in text
        assert f"which connects with ranks 0,1/group {2 - rank} instead" in text


def meshes() -> list[Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    seen = []
    for group in (mesh, mesh["pp"], mesh["tp"], mesh["pp"].get_group()):
        with commlayer.connect(CONFIG, group=group) as comm:
            said = comm.broadcast_object(dist.get_rank(), src=comm.world_size - 1)
            seen.append((comm.rank, comm.world_size, said))
    dist.destroy_process_group()
    return seen


def test_a_mesh_and_its_dimensions_are_groups(ranks: Ranks) -> None:
    results = ranks.run(meshes, 4, timeout=90)
    for rank, (whole, pp, tp, group) in enumerate(results):
        assert whole == (rank, 4, 3)
        assert pp == group == (rank // 2, 2, rank % 2 + 2)
        assert tp == (rank % 2, 2, rank // 2 * 2 + 1)


def refused_groups() -> None:
    dist.init_process_group("gloo")
    unknown = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
    for group in ([0, 1], "pp", 0, unknown):
        with pytest.raises(CommError, match=r"is no group of torch|does not know") as caught:
            commlayer.connect(CONFIG, group=group)  # type: ignore[arg-type]
        assert caught.value.kind is ErrorKind.CONFIG
        assert "rank=, world_size= and store=" in caught.value.cure
    only_0 = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(CommError, match="not a member"):
            commlayer.connect(CONFIG, group=only_0)
    with pytest.raises(CommError, match="Pass either"):
        commlayer.connect(CONFIG, group=dist.group.WORLD, rank=0)
    dist.destroy_process_group()


def test_what_is_no_group_is_refused(ranks: Ranks) -> None:
    ranks.run(refused_groups, 2)


def counted_by_the_caller(store_given: bool) -> Any:
    rank, size = here.rank(), np.int64(here.world_size())
    given = {"store": here.store()} if store_given else {}
    with commlayer.connect(CONFIG, rank=np.int32(rank), world_size=size, **given) as comm:
        assert (comm.rank, comm.world_size) == (rank, 3)
        assert type(comm.rank) is int
        return comm.broadcast_object("said", src=1) if rank == 1 else comm.broadcast_object(None, 1)


@pytest.mark.parametrize("store_given", [True, False], ids=["store", "environment's store"])
def test_the_caller_may_say_rank_and_size_and_store(ranks: Ranks, store_given: bool) -> None:
    assert ranks.run(counted_by_the_caller, 3, store_given, timeout=60) == ["said"] * 3


def test_threads_may_be_ranks_that_share_a_store(no_launcher: pytest.MonkeyPatch) -> None:
    store: Any = dist.HashStore()

    def connect(rank: int) -> Any:
        with commlayer.connect(CONFIG, rank=rank, world_size=2, store=store) as comm:
            comm.isend_object(rank, 1 - rank)
            return comm.recv_object(1 - rank)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(connect, range(2))) == [1, 0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rank": 0}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR, MASTER_PORT not set"),
        ({"world_size": 2, "store": "HashStore"}, "RANK not set"),
        ({"rank": 2, "world_size": 2, "store": "HashStore"}, "RANK = 2 is not in a world of 2"),
        ({"rank": -1, "world_size": 2, "store": "HashStore"}, "rank = -1 is not an integer"),
        ({"rank": "0", "world_size": 2, "store": "HashStore"}, "rank = '0' is not an integer"),
        ({"rank": 0, "world_size": True, "store": "HashStore"}, "world_size = True"),
        ({"rank": 0, "world_size": 2, "store": {}}, r"store = \{\} is no store"),
    ],
)
def test_what_the_caller_says_wrong_is_named(
    no_launcher: pytest.MonkeyPatch, arguments: dict[str, Any], named: str
) -> None:
    if arguments.get("store") == "HashStore":
        arguments = {**arguments, "store": dist.HashStore()}
    with pytest.raises(CommError, match=named) as caught:
        commlayer.connect(CONFIG, **arguments)
    assert caught.value.kind is ErrorKind.CONFIG


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0", "WORLD_SIZE": "1"}], ids=["nothing", "size of 1"]
)
def test_one_rank_alone_needs_no_launcher(
    no_launcher: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    """As in a notebook, whose cells are run again without a close."""
    for variable, value in environment.items():
        no_launcher.setenv(variable, value)
    for _ in range(3):
        comm = commlayer.connect({"backend": "gloo"})
        assert (comm.rank, comm.world_size) == (0, 1)
        assert comm.broadcast_object({"a": 1}, src=0) == {"a": 1}
    comm.close()


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_one_of_several_is_not_taken_for_one_alone(
    no_launcher: pytest.MonkeyPatch, variable: str
) -> None:
    no_launcher.setenv(variable, "4")
    with pytest.raises(CommError, match="has started this process as one of several") as caught:
        commlayer.connect({"backend": "gloo"})
    assert caught.value.kind is ErrorKind.CONFIG
    if variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        assert "backend = 'mpi'" in caught.value.cure
    no_launcher.setenv(variable, "1")
    commlayer.connect({"backend": "gloo"}).close()


def in_threads() -> list[int]:
    """Under one name: they take turns, and pair in some order."""
    store = here.store()

    def connect(index: int) -> Communicator:
        size = here.world_size()
        return commlayer.connect(CONFIG, rank=here.rank(), world_size=size, store=store)

    with ThreadPoolExecutor(4) as pool:
        comms = list(pool.map(connect, range(4)))
    for comm in comms:
        comm.close()
    return [comm.world_size for comm in comms]


def test_threads_that_connect_under_one_name_take_turns(ranks: Ranks) -> None:
    assert ranks.run(in_threads, 2, timeout=60) == [[2] * 4] * 2
