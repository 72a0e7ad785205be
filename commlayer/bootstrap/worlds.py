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
from commlayer.bootstrap.groups import members_of
from commlayer.bootstrap.launch import (
    checked_number,
    launcher_holds_store,
    number,
    refusal,
    run_id,
)
from commlayer.bootstrap.stores import Address, open_store, prefixed

if TYPE_CHECKING:
    from commlayer.config import CommConfig


def world_of_group(config: CommConfig, group: Any) -> World:
    """The ranks of a ``torch.distributed`` group or device mesh (``None``: the default group)."""
    if not torch_is_initialised():
        raise refusal("torch.distributed is not initialised", "Call init_process_group() first")
    ranks, name = members_of(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise refusal("this rank is not a member of the group", "Only its members call connect()")
    return _world(
        config,
        own_client(dist.distributed_c10d._get_default_store()),
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        of=f"ranks {','.join(map(str, ranks))}/{name}",
    )


def world_of_job(config: CommConfig, backend: Backend) -> World:
    """The ranks that a launcher started: the backend's own, else ``torchrun``.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if not torch_is_initialised():
        job = backend.job(config.connect_timeout)
        if job is not None:
            return _world(config, own_client(job.store), rank=job.rank, size=job.size, of="job")
    return world_of_environment(config)


def world_of_environment(config: CommConfig) -> World:
    """The ranks that ``torchrun`` describes in the environment; one rank where it says nothing.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if torch_is_initialised():
        return world_of_group(config, None)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return world_of_given(config, 0, 1, None)
    return world_of_given(config, None, None, None)


def world_of_given(config: CommConfig, rank: Any, size: Any, store: Any) -> World:
    """The ranks that the caller counts; what it does not give is taken from the environment."""
    missing = [v for v, value in (("RANK", rank), ("WORLD_SIZE", size)) if value is None]
    alone = (os.environ.get("WORLD_SIZE") if size is None else size) in (1, "1")
    if store is None and not alone:
        missing += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [variable for variable in missing if variable not in os.environ]
    if missing:
        raise refusal(
            f"{', '.join(missing)} not set in the environment",
            "Start the ranks with torchrun, set the variables, or pass group=, or rank=, "
            "world_size= and store=",
        )
    rank = number("RANK") if rank is None else checked_number("rank", rank)
    size = number("WORLD_SIZE") if size is None else checked_number("world_size", size)
    if not 0 <= rank < size:
        raise refusal(
            f"RANK = {rank} is not in a world of {size}", "Correct the environment or the arguments"
        )
    if store is not None:
        if not all(callable(getattr(store, call, None)) for call in ("set", "get", "check")):
            raise refusal(
                f"store = {store!r} is no store", "Pass a torch.distributed store, such as TCPStore"
            )
        return _world(config, own_client(store), rank=rank, size=size, of="given")
    if size == 1:
        # There is nobody to share a store with.
        return _world(config, HashStore(), rank=0, size=1, of="alone")
    port = number("MASTER_PORT")
    if not 0 <= port < 1 << 16:
        raise refusal(f"MASTER_PORT = {port} is not a port", "Correct the environment")
    client = open_store(
        Address(os.environ["MASTER_ADDR"], port),
        serve=rank == 0 and not launcher_holds_store(),
        limit=config.connect_timeout,
    )
    return _world(config, client, rank=rank, size=size, of="environment")


def torch_is_initialised() -> bool:
    """Whether ``torch.distributed`` has a default group."""
    return dist.is_available() and dist.is_initialized()


def _world(config: CommConfig, store: Any, *, rank: int, size: int, of: str) -> World:
    common = f"commlayer/{run_id()}/{config.name}"
    store = prefixed(prefixed(store, common), of)  # ranks of crossing groups meet at the outer one
    return World(rank, size, store, config.connect_timeout, f"{common}/{of}")
