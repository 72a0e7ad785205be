"""Two ranks that talk over one backend: started by `run`, played by ``python -m`` this module."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from commlayer.backend import Backend
from commlayer.communicator import Communicator
from commlayer.errors import CommError
from commlayer_tools.doctor.checks import Check

SECONDS = 2.0
"""About how long the ranks talk."""
_LIMIT = 90.0
_LOOPBACK = "127.0.0.1"
_LARGE = 4 << 20


class Figures(msgspec.Struct, frozen=True):
    """Of one rank: round trips of a small dict, and sends of a large tensor."""

    round_trip_us: float
    mib_per_second: float


def run(backend: Backend, seconds: float = SECONDS) -> Check:
    """Start two processes that connect over `backend`, exchange messages, and close."""
    name = f"self-test over {backend.name}"
    began = time.monotonic()
    try:
        figures = _play(backend, seconds)
    except (CommError, RuntimeError, OSError) as error:
        return Check(name, "failed", _last_line(str(error)), "See `commlayer probe`, and the text")
    return Check(
        name,
        "ok",
        f"small dict there and back {figures.round_trip_us:.0f} us, "
        f"{_LARGE >> 20} MiB tensors {figures.mib_per_second:.0f} MiB/s "
        f"({time.monotonic() - began:.1f} s)",
    )


def _play(backend: Backend, seconds: float) -> Figures:
    command = [sys.executable, "-m", __name__, backend.name, str(seconds)]
    launcher = list(backend.launcher(2))
    environment = {key: value for key, value in os.environ.items() if key not in _OF_A_JOB}
    if launcher:
        return _result([[*launcher, *command]], [environment])
    port = _free_port()
    environments = [
        {
            **environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": _LOOPBACK,
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    ]
    return _result([command, command], environments)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


_OF_A_JOB = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


def _result(commands: Sequence[Sequence[str]], environments: Sequence[dict[str, str]]) -> Figures:
    """Run the processes to their end; what rank 0 has measured.  Raises `RuntimeError`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "figures")
        processes = [
            subprocess.Popen(
                [*command, str(path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for command, environment in zip(commands, environments, strict=True)
        ]
        deadline = time.monotonic() + _LIMIT
        complaints = []
        try:
            for process in processes:
                said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1]
                if process.returncode:
                    complaints.append(_last_line(said) or f"exit code {process.returncode}")
        except subprocess.TimeoutExpired:
            complaints.append(f"it did not end within {_LIMIT:g} s")
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
        if complaints:
            raise RuntimeError(complaints[0])
        return msgspec.json.decode(path.read_bytes(), type=Figures)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if not line.startswith("see docs/")]
    return lines[-1].strip() if lines else ""


def talk(comm: Communicator, peer: int, seconds: float) -> Figures:
    """Exchange small dicts, then send large tensors, for so long; both ranks call it.

    The lower rank decides when to go on, so that both send as often as each other receives.
    """
    leads = comm.rank < peer
    large = torch.ones(_LARGE, dtype=torch.uint8)
    trips, moved = 0, 0
    began = now = time.perf_counter()
    more = True
    while more:
        if leads:
            now = time.perf_counter()
            more = now - began < seconds / 2
            comm.send_tensor_dict({"x": torch.ones(8), "more": more}, peer)
            _expect(comm.recv_tensor_dict(peer)["x"].sum().item() == 8)
        else:
            more = comm.recv_tensor_dict(peer)["more"]
            comm.send_tensor_dict({"x": torch.ones(8)}, peer)
        trips += 1
    trip_seconds = now - began
    began = now = time.perf_counter()
    more = True
    while more:
        if leads:
            now = time.perf_counter()
            more = now - began < seconds / 2
            comm.send_tensor_dict({"x": large, "more": more}, peer)
        else:
            message = comm.recv_tensor_dict(peer)
            more = message["more"]
            _expect(message["x"].numel() == _LARGE)
        moved += 1
    comm.send_object(moved, peer)
    _expect(comm.recv_object(peer) == moved)
    return Figures(1e6 * trip_seconds / trips, moved * _LARGE / (1 << 20) / max(now - began, 1e-9))


def _expect(condition: bool) -> None:
    if not condition:
        raise RuntimeError("a message arrived with other contents than were sent")


def _main(backend: str, seconds: str, path: str) -> None:
    import commlayer

    comm = commlayer.connect({"backend": backend, "name": "doctor", "connect_timeout": 60.0})
    figures = talk(comm, 1 - comm.rank, float(seconds))
    if comm.rank == 0:
        Path(path).write_bytes(msgspec.json.encode(figures))
    comm.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])
