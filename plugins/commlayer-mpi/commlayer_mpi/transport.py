"""Point-to-point operations on communicators of the connection's own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
from mpi4py import MPI
from torch import Tensor

from commlayer.backend import Endpoint, Transport, World
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer_mpi.job import job_communicator, largest_tag

_TAG_BITS = 30
"""The core's tags are smaller than ``2 ** _TAG_BITS``."""
_MOST_COMMUNICATORS = 8
_POLL_SECONDS = 0.001

_creations = itertools.count()


class MpiWork:
    """One request with the memory it uses.  Its error is kept.

    MPI reports an error once and then takes the request for complete, while
    several callers may ask.
    """

    def __init__(self, request: MPI.Request, tensor: Tensor) -> None:
        self._request = request
        self._tensor = tensor
        self._error: Exception | None = None

    def test(self) -> bool:
        return self._ask(self._request.Test)

    def wait(self) -> None:
        self._ask(self._request.Wait)

    def _ask(self, question: Callable[[], bool]) -> bool:
        if self._error is not None:
            raise self._error
        try:
            return question()
        except Exception as error:
            self._error = error
            raise


class MpiEndpoint(Endpoint):
    """Communicators with all ranks of the world, in its order.

    There are several where the library's largest tag is below the core's: the
    upper bits of a tag choose the communicator.
    """

    def __init__(self, communicators: list[MPI.Intracomm], tag_bits: int) -> None:
        self._communicators = communicators
        self._tag_bits = tag_bits
        self._mask = (1 << tag_bits) - 1

    def isend(self, tensor: Tensor, dst: int, tag: int) -> MpiWork:
        comm = self._communicators[tag >> self._tag_bits]
        return MpiWork(comm.Isend(_buffer(tensor), dst, tag & self._mask), tensor)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> MpiWork:
        comm = self._communicators[tag >> self._tag_bits]
        return MpiWork(comm.Irecv(_buffer(tensor), src, tag & self._mask), tensor)

    def poll(self, work: MpiWork) -> bool:
        return work.test()

    def close(self) -> None:
        if not MPI.Is_finalized():
            for comm in self._communicators:
                comm.Free()
        self._communicators = []


def _buffer(tensor: Tensor) -> Any:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel()), MPI.BYTE]


class MpiTransport(Transport):
    """Makes communicators among the ranks of `world`, which are ranks of one MPI job."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._job = job_communicator()
        self._tag_bits = min(_TAG_BITS, (largest_tag(self._job) + 1).bit_length() - 1)
        if 1 << (_TAG_BITS - self._tag_bits) > _MOST_COMMUNICATORS:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                "backend 'mpi'",
                f"tags of this MPI library end at {largest_tag(self._job)}",
                "Use an MPI library, or a network of it, whose MPI_TAG_UB is at least 2**27 - 1",
            )

    def endpoint(self, name: str) -> Endpoint:
        members, creation = self._meet(name)
        group = self._job.Get_group().Incl(members)
        communicators = []
        for _ in range(1 << (_TAG_BITS - self._tag_bits)):
            comm = self._job.Create_group(group, creation & largest_tag(self._job))
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            communicators.append(comm)
        group.Free()
        return MpiEndpoint(communicators, self._tag_bits)

    def _meet(self, name: str) -> tuple[list[int], int]:
        """Ranks of the MPI job by rank of the world, and a number for this creation.

        Making a communicator blocks without limit until all take part, so they
        meet here first.
        """
        store, size = self._world.store, self._world.size
        keys = [f"mpi/{name}/{rank}" for rank in range(size)]
        mine = msgspec.msgpack.encode((self._job.rank, next(_creations)))
        store.set(keys[self._world.rank], mine)
        deadline = time.monotonic() + self._world.connect_timeout
        while absent := [rank for rank, key in enumerate(keys) if not store.check([key])]:
            if time.monotonic() >= deadline:
                raise CommTimeout(
                    f"mpi communicator {name!r}",
                    f"rank {', '.join(map(str, absent))} of {size} did not come within "
                    f"{self._world.connect_timeout:g} s",
                    "Start all ranks; see connect_timeout",
                )
            time.sleep(_POLL_SECONDS)
        answers = [msgspec.msgpack.decode(store.get(key), type=tuple[int, int]) for key in keys]
        members = [rank for rank, _ in answers]
        if len(set(members)) != size:
            raise CommError(
                ErrorKind.CONFIG,
                "backend 'mpi'",
                f"the {size} ranks are not of one MPI job of {size} processes or more (ranks "
                f"{', '.join(map(str, members))} in MPI; this process is in a job of "
                f"{self._job.size})",
                f"Start them together: mpiexec -n {size} python PROGRAM",
            )
        return members, answers[0][1]
