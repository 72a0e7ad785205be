"""Functions run on the ranks of one job of ``mpiexec``, which lasts for many tests.

Starting a job costs seconds, connecting milliseconds: the ranks stay, and every
function makes connections of its own.  What tests and ranks tell each other
goes through sockets, not through the transport under test.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_MEET, _RETURNED, _RAISED = "meet", "returned", "raised"


def command(size: int, *arguments: str) -> list[str]:
    """The command line of a Python program on `size` ranks."""
    from commlayer_mpi import MpiBackend

    return [*MpiBackend().launcher(size), sys.executable, *arguments]


class Job:
    """The test's side: `size` ranks that wait for functions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/socket"
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._ranks: dict[int, Connection] = {}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            listener.settimeout(60)
            self._process = subprocess.Popen(
                command(size, __file__, address),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            )
            for _ in range(size):
                connection = Connection(listener.accept()[0].detach())
                self._ranks[connection.recv()] = connection

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 30) -> list[Any]:
        """What ``function(*arguments)`` of a test module returns on each rank, in their order.

        Fails if a rank raises, or says nothing for `timeout` seconds; a job
        that has failed is of no more use.
        """
        __tracebackhide__ = True
        for connection in self._ranks.values():
            connection.send((function.__module__, function.__qualname__, arguments))
        results: dict[int, Any] = {}
        while len(results) < self.size:
            results.update(self._round(timeout))
        return [results[rank] for rank in range(self.size)]

    def _round(self, timeout: float) -> dict[int, Any]:
        """One report of every rank: all meet, or all return."""
        __tracebackhide__ = True
        waiting = {connection: rank for rank, connection in self._ranks.items()}
        reports: dict[int, tuple[str, Any]] = {}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                raise self._failure(f"ranks {sorted(waiting.values())} hang")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    reports[rank] = connection.recv()
                except (EOFError, ConnectionError):
                    raise self._failure(f"rank {rank} has died") from None
                if reports[rank][0] == _RAISED:
                    raise self._failure(f"rank {rank} raised\n{reports[rank][1]}")
        what = {kind for kind, _ in reports.values()}
        if len(what) > 1:
            raise self._failure(f"some ranks return and others meet: {reports}")
        if what == {_MEET}:
            for connection in self._ranks.values():
                connection.send(None)
            return {}
        return {rank: value for rank, (_, value) in reports.items()}

    def _failure(self, text: str) -> AssertionError:
        size = os.fstat(self._output.fileno()).st_size
        output = os.pread(self._output.fileno(), size, 0).decode(errors="replace")
        self.kill()
        return AssertionError(f"{text}\n--- output of the job\n{output}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> int:
        """Let the ranks end as programs do; the exit code of ``mpiexec``."""
        for connection in self._ranks.values():
            connection.close()
        try:
            return self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._output.close()
            self._folder.cleanup()


class Jobs:
    """One job per number of ranks, made at first use and anew after a failure."""

    def __init__(self) -> None:
        self._jobs: dict[int, Job] = {}

    def __call__(self, size: int) -> Job:
        job = self._jobs.get(size)
        if job is None or not job.alive:
            job = self._jobs[size] = Job(size)
        return job

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        for job in self._jobs.values():
            job.close()


_parent: Connection


def meet() -> None:
    """In a rank: wait until every rank of the job is here."""
    _parent.send((_MEET, None))
    _parent.recv()


def _main(address: str) -> None:
    global _parent
    from mpi4py import MPI

    folder = Path(__file__).parent
    sys.path[:0] = [str(folder), str(folder.parent)]
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        _parent = Connection(link.detach())
    _parent.send(MPI.COMM_WORLD.rank)
    while True:
        try:
            module, name, arguments = _parent.recv()
        except (EOFError, ConnectionError):
            return
        try:
            value = getattr(importlib.import_module(module), name)(*arguments)
        except BaseException:
            _parent.send((_RAISED, traceback.format_exc()))
        else:
            _parent.send((_RETURNED, value))


if __name__ == "__main__":
    sys.modules["mpi_job"] = sys.modules["__main__"]
    _main(sys.argv[1])
