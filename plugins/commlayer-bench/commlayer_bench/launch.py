"""Start the ranks of a job, hand on what they say, and leave none behind."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer_bench.job import Job, Message

SILENCE = 600.0
"""Seconds after which ranks that say nothing are ended."""

_message = msgspec.json.Decoder(Message)


def run_ranks(job: Job, launcher: Sequence[str] = ()) -> Iterator[Message]:
    """Run `job` and yield what its rank 0 says.

    `launcher` is the command that starts all ranks (``mpiexec -n 2``); without
    one they are started one by one.  Raises `CommError` when a rank dies or all
    fall silent.  No process outlives the iteration.
    """
    command = [sys.executable, "-m", "commlayer_bench.rank", msgspec.json.encode(job).decode()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for variable in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"):
        environment.pop(variable, None)
    with tempfile.TemporaryFile() as errors:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            if launcher:
                processes.append(_start([*launcher, *command], environment, errors))
            else:
                for rank in range(job.ranks):
                    own = {**environment, "RANK": str(rank)}
                    processes.append(_start(command, own, errors))
            yield from _messages(processes, errors)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.communicate()


def _start(
    command: Sequence[str], environment: dict[str, str], errors: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
    )


def _messages(processes: list[subprocess.Popen[bytes]], errors: IO[bytes]) -> Iterator[Message]:
    first = processes[0].stdout
    assert first is not None
    pending = b""
    heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(first, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=0.5):
                data = os.read(first.fileno(), 1 << 16)
                if not data:
                    break
                heard = time.monotonic()
                *lines, pending = (pending + data).split(b"\n")
                yield from map(_message.decode, lines)
            elif any(process.poll() for process in processes):
                break
            elif time.monotonic() - heard > SILENCE:
                raise _failure(f"the ranks said nothing for {SILENCE:.0f} s", errors)
    for rank, process in enumerate(processes):
        try:
            code = process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            raise _failure(f"rank {rank} does not end", errors) from None
        if code:
            raise _failure(f"rank {rank} ended with {code}", errors)


def _failure(cause: str, errors: IO[bytes]) -> CommError:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    detail = "\n".join(lines[-15:])
    return CommError(
        ErrorKind.PEER_LOST, "bench", f"{cause}\n{detail}".strip(), "All ranks were ended"
    )
