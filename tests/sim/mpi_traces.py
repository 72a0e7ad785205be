"""A program for ``mpiexec -n 2``: its ranks follow the traces on a real MPI library."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI
from traces import MPI as TRACES
from traces import follow


class Work:
    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()

    def is_completed(self) -> bool:
        return self._request.Test()


class Channel:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        return Work(self._comm.Isend(tensor.numpy(), dst, tag))

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return Work(self._comm.Irecv(tensor.numpy(), src, tag))


def main(folder: str) -> None:
    """Write ``{trace: observations}`` to a file of `folder` named after the rank."""
    world = MPI.COMM_WORLD
    seen = {
        name: follow(
            trace[world.rank],
            world.rank,
            Channel(world.Dup()),
            world.Barrier,
            lambda: time.sleep(0.001),
        )
        for name, trace in TRACES.items()
    }
    Path(folder, str(world.rank)).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
