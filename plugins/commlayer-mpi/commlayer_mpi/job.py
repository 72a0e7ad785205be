"""The ranks that ``mpiexec`` started: MPI initialised, and a store that they share."""

from __future__ import annotations

import functools
import os
import threading
import time
from typing import Any

import msgspec
from mpi4py import MPI
from torch._C._distributed_c10d import Store

from commlayer.backend import World
from commlayer.errors import CommError, ErrorKind


def launched(connect_timeout: float) -> World | None:
    """All ranks of the MPI job; ``None`` where another launcher made a larger world."""
    comm = job_communicator()
    if comm.size == 1 and os.environ.get("WORLD_SIZE", "1") != "1":
        return None
    store: Any = _job_store()
    return World(comm.rank, comm.size, store, connect_timeout)


def job_communicator() -> MPI.Intracomm:
    """``MPI.COMM_WORLD``.  Raises `CommError` unless MPI may be called from several threads."""
    if MPI.Is_finalized():
        raise _refusal("MPI was finalized in this process", "Connect before MPI.Finalize()")
    if not MPI.Is_initialized():
        raise _refusal(
            "MPI is not initialised, because mpi4py.rc.initialize is false",
            "Call MPI.Init_thread(MPI.THREAD_MULTIPLE) first",
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise _refusal(
            "MPI was initialised with less than MPI_THREAD_MULTIPLE, and operations are "
            "polled on a thread of commlayer's beside the callers'",
            "Leave mpi4py.rc.thread_level at 'multiple', with an MPI library that provides it",
        )
    return MPI.COMM_WORLD


def _refusal(cause: str, cure: str) -> CommError:
    return CommError(ErrorKind.CONFIG, "backend 'mpi'", cause, cure)


class JobStore(Store):
    """A store without a server: what one rank sets is sent to every other rank.

    Its messages travel on ``MPI.COMM_WORLD`` under the largest tag, because a
    communicator of its own could only be made by all ranks at once, which would
    leave nobody to name the absent.
    """

    _POLL_SECONDS = 0.001

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__()
        self._comm = comm
        self._tag = largest_tag(comm)
        self._items: dict[str, bytes] = {}
        self._sending: list[tuple[MPI.Request, bytes]] = []
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        message = msgspec.msgpack.encode((key, value))
        with self._lock:
            self._items[key] = value
            for rank in range(self._comm.size):
                if rank != self._comm.rank:
                    request = self._comm.Isend([message, MPI.BYTE], rank, self._tag)
                    self._sending.append((request, message))

    def check(self, keys: list[str]) -> bool:
        self._progress()
        return all(key in self._items for key in keys)

    def get(self, key: str) -> bytes:
        while not self.check([key]):
            time.sleep(self._POLL_SECONDS)
        return self._items[key]

    def _progress(self) -> None:
        with self._lock:
            self._sending = [(r, message) for r, message in self._sending if not r.Test()]
            status = MPI.Status()
            while (probed := self._comm.Improbe(MPI.ANY_SOURCE, self._tag, status)) is not None:
                message = bytearray(status.Get_count(MPI.BYTE))
                probed.Recv([message, MPI.BYTE])
                key, value = msgspec.msgpack.decode(message, type=tuple[str, bytes])
                self._items[key] = value


def largest_tag(comm: MPI.Intracomm) -> int:
    """The library's ``MPI_TAG_UB``."""
    bound = comm.Get_attr(MPI.TAG_UB)
    assert isinstance(bound, int)
    return bound


@functools.cache
def _job_store() -> JobStore:
    return JobStore(job_communicator())
