"""Who connects with whom, and whether they agree."""

from __future__ import annotations

import os
import socket
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from commlayer.backend import Backend, World
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.progress.runtime import Runtime
from commlayer.semantics import Semantics

if TYPE_CHECKING:
    from commlayer.config import CommConfig

_POLL_SECONDS = 0.005
_generations: Counter[str] = Counter()
_environment_stores: dict[tuple[str, str], Any] = {}


def world_of_group(config: CommConfig, group: Any) -> World:
    """The ranks of an existing ``torch.distributed`` group (``None``: of the default group)."""
    if not (dist.is_available() and dist.is_initialized()):
        raise _refusal("torch.distributed is not initialised", "Call init_process_group() first")
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise _refusal("this rank is not a member of the group", "Only its members call connect()")
    return _world(
        config,
        dist.distributed_c10d._get_default_store(),
        rank=ranks.index(dist.get_rank()),
        size=len(ranks),
        members=",".join(map(str, ranks)),
    )


def world_of_job(config: CommConfig, backend: Backend) -> World:
    """The ranks that a launcher started: the backend's own, else ``torchrun``.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if not (dist.is_available() and dist.is_initialized()):
        job = backend.job(config.connect_timeout)
        if job is not None:
            members = ",".join(map(str, range(job.size)))
            return _world(config, job.store, rank=job.rank, size=job.size, members=members)
    return world_of_environment(config)


def world_of_environment(config: CommConfig) -> World:
    """The ranks that ``torchrun`` describes in the environment.

    Uses the default group of ``torch.distributed`` if that is initialised.
    """
    if dist.is_available() and dist.is_initialized():
        return world_of_group(config, None)
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise _refusal(
            f"{', '.join(missing)} not set in the environment",
            "Start the ranks with torchrun, set the variables, or pass group=",
        )
    address = (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < size:
        raise _refusal(f"RANK = {rank} is not in a world of {size}", "Correct the environment")
    if address not in _environment_stores:
        limit = timedelta(seconds=config.connect_timeout)
        try:
            _environment_stores[address] = next(rendezvous("env://", timeout=limit))[0]
        except (RuntimeError, ValueError) as error:
            raise CommError(
                ErrorKind.CONFIG,
                "connect",
                f"the store at {address[0]}:{address[1]} cannot be reached ({error})",
                "Start rank 0 within connect_timeout, and check MASTER_ADDR and MASTER_PORT",
            ) from error
    members = ",".join(map(str, range(size)))
    return _world(config, _environment_stores[address], rank=rank, size=size, members=members)


def _number(variable: str) -> int:
    text = os.environ[variable]
    try:
        return int(text)
    except ValueError:
        raise _refusal(f"{variable} = {text!r} is not a number", "Correct it") from None


def _refusal(cause: str, cure: str) -> CommError:
    return CommError(ErrorKind.CONFIG, "connect", cause, cure)


def _world(config: CommConfig, store: Any, *, rank: int, size: int, members: str) -> World:
    key = f"commlayer/{config.name}/{members}"
    _generations[key] += 1
    prefixed: Any = PrefixStore(f"{key}/{_generations[key]}", store)
    return World(rank, size, prefixed, config.connect_timeout)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each rank tells the others before anything is opened.

    What must be equal on all ranks is in `_MUST_AGREE`.
    """

    wire_version: int
    backend: str
    channels: tuple[str, ...]
    inline_bytes: int
    allow_pickle: bool
    facts: Semantics
    headers_ahead: int
    payloads_ahead: int
    version: str
    host: str
    pid: int

    @staticmethod
    def whereabouts() -> tuple[str, int]:
        return socket.gethostname(), os.getpid()


_decoder = msgspec.msgpack.Decoder(Hello)
_MUST_AGREE = ("wire_version", "backend", "channels", "inline_bytes", "allow_pickle", "facts")


def agree(world: World, hello: Hello, runtime: Runtime) -> dict[int, Hello]:
    """Exchange hellos with every rank; returns those of all ranks.

    Raises `CommTimeout` naming the ranks that are absent after the connect
    timeout, and `CommError` (CONFIG) naming the first rank that differs, what
    differs, and both values.
    """
    world.store.set(f"hello/{world.rank}", msgspec.msgpack.encode(hello))
    wait_for_all(world, [f"hello/{r}" for r in range(world.size)], runtime)
    hellos = {}
    for rank in range(world.size):
        said = world.store.get(f"hello/{rank}")
        try:
            other = hellos[rank] = _decoder.decode(said)
        except msgspec.MsgspecError as error:
            raise _refusal(
                f"rank {world.rank} (pid {hello.pid} on {hello.host}, wire version "
                f"{hello.wire_version}) and rank {rank} ({_stranger(said)}) run versions of "
                f"commlayer that greet each other differently ({error})",
                f"Install commlayer {hello.version} on all ranks",
            ) from error
        for name in _MUST_AGREE:
            mine, theirs = getattr(hello, name), getattr(other, name)
            if mine != theirs:
                what = _difference(name, mine, theirs)
                raise _refusal(
                    f"rank {world.rank} (pid {hello.pid} on {hello.host}) and rank {rank} "
                    f"(pid {other.pid} on {other.host}) differ in {what}",
                    "Configure and install the same on all ranks",
                )
    return hellos


class _AnyHello(msgspec.Struct):
    """What can be read of a hello of any version."""

    pid: int
    host: str
    wire_version: int


def _stranger(said: bytes) -> str:
    try:
        other = msgspec.msgpack.decode(said, type=_AnyHello)
    except msgspec.MsgspecError:
        return "which says nothing legible of itself"
    return f"pid {other.pid} on {other.host[:64]}, wire version {other.wire_version}"


def wait_for_all(world: World, keys: list[str], runtime: Runtime) -> None:
    """Wait until every rank has set its key of `keys`.

    Raises `CommTimeout` naming the ranks that have not after the connect timeout.
    """
    deadline = runtime.now() + world.connect_timeout
    while True:
        absent = [rank for rank, key in enumerate(keys) if not world.store.check([key])]
        if not absent:
            return
        if runtime.now() >= deadline:
            raise CommTimeout(
                "connect",
                f"rank {', '.join(map(str, absent))} of {world.size} did not connect within "
                f"{world.connect_timeout:g} s",
                "Start all ranks, each with the same `name`; see connect_timeout",
            )
        runtime.sleep(_POLL_SECONDS)


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if isinstance(mine, Semantics):
        return _difference(name, mine.facts(), theirs.facts())
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in mine:
            if mine[key] != theirs.get(key):
                return _difference(f"{name}.{key}", mine[key], theirs.get(key))
    return f"{name}: {mine!r} and {theirs!r}"
