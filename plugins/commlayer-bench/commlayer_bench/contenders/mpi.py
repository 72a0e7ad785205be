"""mpi4py, pickled (its lower-case methods) and on buffers of known shape (its upper-case ones).

The ranks must have been started by ``mpiexec``.  MPI ranks are put in the order
of the ranks of ``torch.distributed``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from commlayer_bench.contender import Contender, Finish, Unavailable, Way


def launcher(ranks: int) -> list[str]:
    """The command that starts ranks which can call MPI; empty where there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        return []
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec")
    return [found, "-n", str(ranks)] if found else []


def connect_pickle(name: str) -> Contender:
    comm = _communicator()

    def send(value: Any, dst: int) -> Finish:
        return comm.isend(value, dst).wait  # type: ignore[no-any-return]

    def receive(like: object, src: int) -> Finish:
        return lambda: comm.recv(source=src)

    way = Way(send, receive)
    return Contender(name, {"object": way, "dict": way}, early=False, driven=True)


def connect_buffer(name: str) -> Contender:
    comm = _communicator()
    from mpi4py import MPI

    def send(value: Any, dst: int) -> Finish:
        requests = [comm.Isend(data, dst, tag) for tag, data in enumerate(_buffers(value))]
        return lambda: MPI.Request.Waitall(requests)

    def receive(like: Any, src: int) -> Finish:
        value = _empty_like(like)
        requests = [comm.Irecv(data, src, tag) for tag, data in enumerate(_buffers(value))]

        def finish() -> Any:
            MPI.Request.Waitall(requests)
            return value

        return finish

    def broadcast(tensor: Tensor, src: int) -> Finish:
        (data,) = _buffers(tensor)
        request = comm.Ibcast(data, src)

        def finish() -> Tensor:
            request.Wait()
            return tensor

        return finish

    way = Way(send, receive)
    return Contender(
        name,
        {
            "tensor": way,
            "dict": way,
            "broadcast": Way(broadcast, lambda like, src: broadcast(torch.empty_like(like), src)),
        },
        driven=True,
    )


def _communicator() -> Any:
    if "PMI_RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        raise Unavailable("mpi4py or mpiexec is missing, or the run has more than two ranks")
    import torch.distributed as dist
    from mpi4py import MPI

    return MPI.COMM_WORLD.Split(0, dist.get_rank())


def _buffers(value: Any) -> list[Any]:
    """The memory of a tensor, or of each tensor of a dict, as bytes."""
    tensors = [value] if isinstance(value, Tensor) else value.values()
    return [tensor.view(torch.uint8).numpy() for tensor in tensors]


def _empty_like(like: Any) -> Any:
    if isinstance(like, Tensor):
        return torch.empty_like(like)
    return {key: torch.empty_like(tensor) for key, tensor in like.items()}
