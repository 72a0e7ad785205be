"""A Ray of two nodes, each on a host of its own (a network namespace), and `run.py` on it.

``python tests/ray_actors/two_hosts.py``, or ``make test-ray``; needs root and `ip`.  Exits
with 1 if something did not go as expected.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from hosts.network import ADDRESSES, INTERFACE, Hosts, obstacle  # noqa: E402

ENTRY = f"{ADDRESSES[0]}:6379"
OBJECT_STORE_BYTES = 80 << 20
START_LIMIT = 120
RUN_LIMIT = 300
STOP_LIMIT = 10


def processes(hosts: Hosts) -> list[int]:
    """What runs on the hosts."""
    pids: list[int] = []
    for name in hosts.names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        pids += map(int, listed.stdout.split())
    return pids


def end(hosts: Hosts) -> None:
    """End what runs on the hosts: asked first, then killed."""
    for number, limit in ((signal.SIGTERM, STOP_LIMIT), (signal.SIGKILL, STOP_LIMIT)):
        for pid in processes(hosts):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
        until = time.monotonic() + limit
        while processes(hosts) and time.monotonic() < until:
            time.sleep(0.1)


@contextmanager
def two_nodes(hosts: Hosts, environment: dict[str, str]) -> Iterator[None]:
    """A Ray whose head is on host 0, and whose other node is on host 1."""
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        roles = (
            ["--head", "--port", ENTRY.rpartition(":")[2], "--include-dashboard=false",
             f"--temp-dir={folder}"],
            [f"--address={ENTRY}"],
        )  # fmt: skip
        try:
            for host, role in enumerate(roles):
                subprocess.run(
                    hosts.command(
                        host, str(Path(sys.executable).with_name("ray")), "start", *role,
                        f"--node-ip-address={ADDRESSES[host]}", "--num-cpus=1",
                        f"--object-store-memory={OBJECT_STORE_BYTES}",
                    ),
                    env=environment, stdout=subprocess.DEVNULL, timeout=START_LIMIT, check=True,
                )  # fmt: skip
            yield
        finally:
            end(hosts)


def main() -> int:
    reason = obstacle()
    if reason:
        print(f"Not run over two hosts: {reason}")
        return 0
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with Hosts() as hosts, two_nodes(hosts, environment):
        driver = hosts.command(0, sys.executable, str(HERE / "run.py"), "--address", ENTRY)
        return subprocess.run(driver, env=environment, timeout=RUN_LIMIT).returncode


if __name__ == "__main__":
    sys.exit(main())
