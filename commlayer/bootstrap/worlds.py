"""Who connects with whom: the ranks of a torch group, of a backend's own job, of the environment.

Every world has a client of the store for itself, below a prefix that says which job, and which
group of it, under which name.  Which attempt it is, a `Rendezvous` finds out.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from commlayer.backend import Backend, World, own_client
from commlayer.bootstrap.launch import (
    VARIABLES,
    launcher_holds_store,
    number,
    refusal,
    run_id,
)
from commlayer.bootstrap.stores import Address, open_store, prefixed

if TYPE_CHECKING:
    from commlayer.config import CommConfig


def world_of_group(config: CommConfig, group: Any) -> World:
    """The ranks of an existing ``torch.distributed`` group (``None``: of the default group)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise refusal("torch.distributed is not initialised", "Call init_process_group() first")
    group = group if group is not None else dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    if dist.get_rank() not in ranks:
        raise refusal("this rank is not a member of the group", "Only its members call connect()")
    store = own_client(dist.distributed_c10d._get_default_store())
    members = ",".join(map(str, ranks))
    return _world(
        config,
        store,
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        of=f"group/{group.group_name}/{members}",
    )


def world_of_job(config: CommConfig, backend: Backend) -> World:
    """The ranks that a launcher started: the backend's own, else ``torchrun``.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        job = backend.job(config.connect_timeout)
        if job is not None:
            return _world(config, own_client(job.store), rank=job.rank, size=job.size, of="job")
    return world_of_environment(config)


def world_of_environment(config: CommConfig) -> World:
    """The ranks that ``torchrun`` describes in the environment.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return world_of_group(config, None)
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise refusal(
            f"{', '.join(missing)} not set in the environment",
            "Start the ranks with torchrun, set the variables, or pass group=",
        )
    rank, size, port = (number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < size:
        raise refusal(f"RANK = {rank} is not in a world of {size}", "Correct the environment")
    if not 0 <= port < 1 << 16:
        raise refusal(f"MASTER_PORT = {port} is not a port", "Correct the environment")
    if size == 1:
        store: Any = HashStore()  # there is nobody to share one with
    else:
        store = open_store(
            Address(os.environ["MASTER_ADDR"], port),
            serve=rank == 0 and not launcher_holds_store(),
            limit=config.connect_timeout,
        )
    return _world(config, store, rank=rank, size=size, of="environment")


def _world(config: CommConfig, store: Any, *, rank: int, size: int, of: str) -> World:
    key = f"commlayer/{run_id()}/{config.name}/{of}"
    return World(rank, size, prefixed(store, key), config.connect_timeout)
