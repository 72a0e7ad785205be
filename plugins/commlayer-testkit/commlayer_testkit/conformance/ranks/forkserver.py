"""The process that ranks are forked from.

Importing torch takes seconds, forking a process that has imported it takes
milliseconds.  So the server imports everything once, starts no thread, and forks
on request.  A rank leaves the server's loop, calls its function, and then ends as
any Python program does: exit handlers and finalization included.

The server ends when its client closes the connection, and the kernel then ends its ranks.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from commlayer_testkit.conformance.ranks import here

_PR_SET_PDEATHSIG = 1
FORK, REAP = b"fork", b"reap"
REQUEST_BYTES, MOST_DESCRIPTORS = 1024, 64


class Job(NamedTuple):
    """What a rank is to do; the first message on its connection."""

    path: list[str]
    module: str
    function: str
    arguments: bytes
    environment: dict[str, str]
    finalize: bool
    number: bytes
    """A pickled function that tells the number of the rank; empty where `environment` has it."""


def main() -> Connection:
    """Serve until the client goes; returns in forked ranks only, with their connection.

    With ``--rank`` this process is itself the one rank.
    """
    if sys.argv[1] == "--rank":
        connection, output, *rest = map(int, sys.argv[2:])
        lent = rest[: len(rest) // 2]
        return _settle(connection, output, dict(zip(lent, rest[len(lent) :], strict=True)))
    _preload(sys.argv[2:])
    client = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, descriptors, _, _ = socket.recv_fds(client, REQUEST_BYTES, MOST_DESCRIPTORS)
        if request.startswith(FORK):
            pid = os.fork()
            if pid == 0:
                client.close()
                connection, output, *lent = descriptors
                numbers = map(int, request.split()[1:])
                return _settle(connection, output, dict(zip(numbers, lent, strict=True)))
            for descriptor in descriptors:
                os.close(descriptor)
            client.send(str(pid).encode())
        elif request.startswith(REAP):
            pid = int(request[len(REAP) :])
            _, status = os.waitpid(pid, 0)
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        else:
            os._exit(0)


def _preload(modules: list[str]) -> None:
    import torch

    from commlayer import connect  # noqa: F401

    for module in modules:
        importlib.import_module(module)
    torch.set_num_threads(1)
    gc.freeze()


def _settle(connection: int, output: int, lent: dict[int, int]) -> Connection:
    """Become a rank: a process group of its own, that does not outlive the server.

    `lent` are descriptors by the number that they are to have.
    """
    connection, output = _place([connection, output], lent)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    return Connection(connection)


def _place(kept: list[int], lent: dict[int, int]) -> list[int]:
    """Give `lent` descriptors their numbers, and return new ones of `kept`, out of their way."""
    free = 1 + max(*kept, *lent, *lent.values())
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, free) for each in (*kept, *lent.values())]
    for each in (*kept, *lent.values()):
        os.close(each)
    for number, descriptor in zip(lent, moved[len(kept) :], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return moved[: len(kept)]


def play(connection: Connection) -> None:
    """Call the function of the job and report how it ended, exceptions included."""
    job: Job = pickle.loads(connection.recv_bytes())
    sys.path[:] = job.path
    os.environ.update(job.environment)
    here.connection = connection
    try:
        if job.number:
            rank = pickle.loads(job.number)()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            here.say(rank)
        function: Any = importlib.import_module(job.module)
        for name in job.function.split("."):
            function = getattr(function, name)
        result = function(*pickle.loads(job.arguments))
        report = pickle.dumps((here.RETURNED, result))
    except BaseException:
        connection.send_bytes(pickle.dumps((here.RAISED, traceback.format_exc())))
        raise
    connection.send_bytes(report)
    if not job.finalize:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    play(main())
