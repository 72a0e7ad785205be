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

from ranks import here

_PR_SET_PDEATHSIG = 1
FORK, REAP = b"fork", b"reap"


class Job(NamedTuple):
    """What a rank is to do; the first message on its connection."""

    path: list[str]
    module: str
    function: str
    arguments: bytes
    environment: dict[str, str]
    finalize: bool


def main() -> Connection:
    """Serve until the client goes; returns in forked ranks only, with their connection."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    _preload()
    client = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, descriptors, _, _ = socket.recv_fds(client, 64, 2)
        if request == FORK:
            pid = os.fork()
            if pid == 0:
                client.close()
                return _settle(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            client.send(str(pid).encode())
        elif request.startswith(REAP):
            pid = int(request[len(REAP) :])
            _, status = os.waitpid(pid, 0)
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        else:
            os._exit(0)


def _preload() -> None:
    import commlayer_gloo  # noqa: F401
    import pytest  # noqa: F401
    import torch

    from commlayer import connect  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()


def _settle(connection: int, output: int) -> Connection:
    """Become a rank: a process group of its own, that does not outlive the server."""
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    return Connection(connection)


def play(connection: Connection) -> None:
    """Call the function of the job and report how it ended, exceptions included."""
    job: Job = pickle.loads(connection.recv_bytes())
    sys.path[:] = job.path
    os.environ.update(job.environment)
    here.connection = connection
    try:
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
