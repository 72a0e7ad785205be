"""Ranks in a job of the transport's own launcher, such as ``mpiexec``.

A launcher starts programs itself and tells each who it is by its environment and by
descriptors that it leaves open.  Here it starts one small process a rank (`lend`),
which lends both to a rank that is forked or started as any other.  So every rank is
talked with, watched and ended one by one, and no interpreter imports torch anew.

The launcher learns nothing of how ranks end: it sees its own processes end with 0 when
the run is over.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from commlayer_testkit.conformance.ranks.forkserver import MOST_DESCRIPTORS

_LEND = str(Path(__file__).with_name("lend.py"))
_START_SECONDS = 60.0
_END_SECONDS = 10.0


class Launcher(NamedTuple):
    """What starts the ranks of a backend.

    ``command(size)`` is `Backend.launcher`; ``rank()`` runs in a rank, tells its number
    in the job, and can be pickled.
    """

    command: Callable[[int], Sequence[str]]
    rank: Callable[[], int]


class Place(NamedTuple):
    """What the launcher gave one rank: `descriptors` of this process, by their number there."""

    environment: dict[str, str]
    descriptors: dict[int, int]


class Launch:
    """One job of `size` processes that `command` starts; its `places` wait for ranks.

    Raises `RuntimeError` with the launcher's output when they do not come.
    """

    def __init__(self, command: Sequence[str], size: int) -> None:
        self.places: list[Place] = []
        self._links: list[socket.socket] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            address = f"{folder}/socket"
            listener.bind(address)
            listener.listen(size)
            self._process = subprocess.Popen(
                [*command, sys.executable, "-I", "-S", _LEND, address],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._ended = os.pidfd_open(self._process.pid)
            try:
                while len(self.places) < size:
                    self._accept(listener)
            except (OSError, EOFError) as error:
                self._kill()
                said = os.pread(self._output.fileno(), 1 << 16, 0).decode(errors="replace")
                self.close()
                raise RuntimeError(
                    f"{' '.join(command)} did not start {size} processes: {error}\n{said}"
                ) from error

    def _accept(self, listener: socket.socket) -> None:
        waiting = [listener.fileno(), self._ended]
        came = select.select(waiting, [], [], _START_SECONDS)[0]
        if listener.fileno() not in came:
            raise EOFError("it has ended" if came else f"none came within {_START_SECONDS:g} s")
        link, _ = listener.accept()
        self._links.append(link)
        link.settimeout(_START_SECONDS)
        head, descriptors, _, _ = socket.recv_fds(link, 8, MOST_DESCRIPTORS)
        with link.makefile("rb") as stream:
            environment, numbers = pickle.loads(stream.read(int.from_bytes(head, "big")))
        self.places.append(Place(environment, dict(zip(numbers, descriptors, strict=True))))

    def started(self) -> None:
        """Every place has its rank: give up what was lent."""
        for place in self.places:
            for descriptor in place.descriptors.values():
                os.close(descriptor)
        self.places.clear()

    def close(self) -> None:
        """End the job, whose ranks have ended."""
        self.started()
        while self._links:
            self._links.pop().close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
        os.close(self._ended)
        self._output.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
