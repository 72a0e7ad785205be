"""Run two Ray actors as the ranks of a pipeline, and end one of them in several ways.

``python tests/ray_actors/run.py [--address HOST:PORT]``, or ``make test-ray``.  Without the
address of a Ray that runs, starts one on this machine and shuts it down.  Exits with 1 if
something did not go as expected.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import secrets
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

try:
    import ray
except ImportError as error:
    sys.exit(f"Not run: Ray cannot be imported here ({error}); make test-ray installs it")
from actors import PATIENCE, Stage, payload, tokens

from commlayer import CommConfig, CommError, ErrorKind

SIZE = 2
STEPS = 5
PEER_TIMEOUT = CommConfig().peer_timeout
OBJECT_STORE_BYTES = 80 << 20


@dataclass(frozen=True)
class Ending:
    """How one actor ends, and what the other must be told."""

    name: str
    rank: int
    killed: bool
    told: ErrorKind


ENDINGS = [
    Ending("ray.kill of rank 1", 1, True, ErrorKind.PEER_LOST),
    Ending("ray.kill of rank 0, which holds the store", 0, True, ErrorKind.PEER_LOST),
    Ending("exit_actor() in rank 1, nothing closed", 1, False, ErrorKind.CLOSED),
]


class Unexpected(Exception):
    """Something did not go as expected."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Unexpected(what)


_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """The network interface of this machine that has `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("40s", name.encode()))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    raise Unexpected(f"no interface has {address}")


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of its own, without traces in the home directory; the interface set as by a user."""
    os.environ.update(
        GLOO_SOCKET_IFNAME=interface_of(ray.util.get_node_ip_address()),
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_USAGE_STATS_ENABLED="0",
    )
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        ray.init(
            num_cpus=SIZE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def running_ray(address: str) -> Iterator[None]:
    ray.init(address=address, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def together(stages: list[Any], method: str, *arguments: Any) -> list[Any]:
    """Call `method` of all actors at once; their results."""
    return ray.get(
        [getattr(stage, method).remote(*arguments) for stage in stages], timeout=PATIENCE
    )


@contextmanager
def connected() -> Iterator[list[Any]]:
    """Actors that are connected, by rank; killed at the end."""
    stages = [Stage.remote() for _ in range(SIZE)]
    try:
        store = ray.get(stages[0].store_address.remote(), timeout=PATIENCE)
        connecting = [stage.connect.remote(rank, SIZE, store) for rank, stage in enumerate(stages)]
        places = ray.get(connecting, timeout=PATIENCE)
        nodes = {node for node, _ in places}
        expect(len(set(places)) == SIZE, f"not a process each: {places}")
        expect(len(nodes) == len(ray.nodes()), f"not on every node: {places}")
        where = ", ".join(f"rank {rank} on {node}" for rank, (node, _) in enumerate(places))
        print(f"connected: {where}, store at {store[0]}:{store[1]}")
        yield stages
    finally:
        for stage in stages:
            ray.kill(stage)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def talk(stages: list[Any]) -> None:
    """Tensor dicts both ways, and a broadcast from each."""
    for rank, received in enumerate(together(stages, "exchange", STEPS)):
        expect(len(received) == STEPS, f"rank {rank} received {len(received)} of {STEPS}")
        for step, got in enumerate(received):
            expect(same(got, payload(1 - rank, step)), f"rank {rank}, step {step}: {got}")
    for src in range(SIZE):
        for rank, got in enumerate(together(stages, "broadcast", src)):
            expect(same(got, tokens(src)), f"rank {rank}, tokens of {src}: {got}")
    print(f"exchanged: {STEPS} tensor dicts each way, a broadcast from each rank")


def refusal(call: Any) -> CommError:
    """The error with which a call of an actor ends, as the actor raised it."""
    try:
        result = ray.get(call, timeout=PATIENCE)
    except CommError as error:
        raised: CommError = error.cause  # Ray's attribute of that name hides commlayer's
        return raised
    raise Unexpected(f"no error, but {result}")


def end(stages: list[Any], ending: Ending) -> None:
    """End one actor; what is pending with it, and what is new, must say so."""
    survivor = stages[1 - ending.rank]
    ray.get(survivor.await_nothing.remote(), timeout=PATIENCE)
    pending = survivor.receive.remote()
    begun = time.monotonic()
    if ending.killed:
        ray.kill(stages[ending.rank])
    else:
        stages[ending.rank].leave.remote()
    errors = [refusal(pending)]
    seconds = time.monotonic() - begun
    errors.append(refusal(survivor.send.remote()))
    for error in errors:
        expect(error.kind is ending.told, f"told otherwise: {error}")
        expect(f"rank {ending.rank}" in str(error), f"rank {ending.rank} is not named: {error}")
    expect(seconds <= PEER_TIMEOUT, f"told after {seconds:.2f} s")
    print(f"{ending.name}: {ending.told.name} after {seconds:.2f} s\n  {errors[0].cause}")
    ray.get(survivor.close.remote(), timeout=PATIENCE)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the ranks of a pipeline as Ray actors")
    parser.add_argument("--address", help="of a Ray that runs, with one CPU for each actor")
    address = parser.parse_args().address
    try:
        with running_ray(address) if address else local_ray():
            for ending in ENDINGS:
                with connected() as stages:
                    talk(stages)
                    end(stages, ending)
    except (Unexpected, CommError, ray.exceptions.RayError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"passed: Ray {ray.__version__}, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
