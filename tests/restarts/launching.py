"""Start a job that loses a rank and is restarted, in each way that torchrun has."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from commlayer_testkit.ports import free_port

MOMENTS = ("before", "during", "connected", "raises")
"""When the victim is lost: before, while or after it connects, or by an exception."""
RANK = Path(__file__).with_name("rank.py")
SIZE = 2


class Outcome(NamedTuple):
    """How a job has ended."""

    met: bool
    output: str


def agents(how: str) -> list[list[str]]:
    """Arguments of each agent, of two processes in all."""
    port = free_port()
    if how == "standalone":
        return [["--standalone", f"--nproc-per-node={SIZE}"]]
    if how == "static":
        return [[f"--master-port={port}", f"--nproc-per-node={SIZE}"]]
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job"]
    if how == "c10d":
        return [[*rendezvous, f"--nproc-per-node={SIZE}"]]
    assert how == "two agents"
    return [[*rendezvous, f"--nnodes={SIZE}", "--nproc-per-node=1"]] * SIZE


HOW = ("standalone", "static", "c10d", "two agents")


def run(how: str, way: str, victim: int, moment: str, *, timeout: float = 200) -> Outcome:
    """Run one job; it may restart once.  `way` is that of ``rank.py``."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "RESTARTS_FLAG": f"{folder}/lost",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        commands = [
            [
                *(sys.executable, "-m", "torch.distributed.run", *arguments),
                *("--max-restarts=1", str(RANK), way, str(victim), moment),
            ]
            for arguments in agents(how)
        ]
        return _finish(commands, environment, timeout)


def _finish(commands: Sequence[list[str]], environment: dict[str, str], timeout: float) -> Outcome:
    processes = [
        subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    except subprocess.TimeoutExpired as error:
        return Outcome(False, f"it has not ended after {timeout:g} s\n{error.output!r}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # the agent ends its ranks
                process.wait(60)
    output = "".join(outputs)
    met = all(process.returncode == 0 for process in processes)
    return Outcome(met and output.count("has met the others in attempt") == SIZE, output)
