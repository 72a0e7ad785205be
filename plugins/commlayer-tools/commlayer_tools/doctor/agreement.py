"""Do the ranks of a job agree?  Every rank of the job runs it."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from commlayer.bootstrap.launch import launched_generation
from commlayer.bootstrap.rendezvous import Rendezvous
from commlayer.bootstrap.worlds import world_of_job
from commlayer.config import CommConfig
from commlayer.errors import CommError
from commlayer.registry import Registry
from commlayer.wire.frame import WIRE_VERSION
from commlayer_tools.doctor import selftest
from commlayer_tools.doctor.checks import Check, Status
from commlayer_tools.doctor.machine import installed


class Credentials(msgspec.Struct, frozen=True):
    """What one rank says of itself.  `must` has to be equal on all ranks, `should` had better be.

    `error` says why it knows no more.
    """

    host: str
    pid: int
    must: dict[str, Any]
    should: dict[str, Any]
    error: str = ""


_NOT_SHARED = ("trace_dir", "report_signal", "bind_address", "metrics", "options")
"""Keys of the configuration that ranks may well set differently."""
_MUST = ("backend", "channels", "inline_bytes", "allow_pickle", "name")


def own(registry: Registry) -> Credentials:
    """What this rank says."""
    host, pid = socket.gethostname(), os.getpid()
    should: dict[str, Any] = {
        "commlayer": installed("commlayer"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
    try:
        config = CommConfig.load()
        loaded = registry.select(config.backend)
    except CommError as error:
        return Credentials(host, pid, {}, should, str(error))
    keys = {f.name: getattr(config, f.name) for f in msgspec.structs.fields(CommConfig)}
    keys["channels"] = sorted(config.channels)
    must = {"wire version": WIRE_VERSION, "backend in use": loaded.backend.name}
    must |= {f"config {key}": keys[key] for key in _MUST}
    must |= {f"fact {fact}": value for fact, value in _flat(loaded.backend.semantics.facts())}
    should |= {f"version of {k}": str(v) for k, v in loaded.versions().items()}
    should |= {f"config {k}": v for k, v in keys.items() if k not in (*_MUST, *_NOT_SHARED)}
    return Credentials(host, pid, _plain(must), _plain(should))


def _flat(facts: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """As the other ranks get it."""
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return decoded


def compare(ranks: list[Credentials]) -> Iterator[Check]:
    """One check that all is well, or one per difference, naming the ranks and both values."""
    for rank, each in enumerate(ranks):
        if each.error:
            where = f"rank {rank} (pid {each.pid} on {each.host})"
            yield Check("ranks agree", "failed", f"{where}: {each.error}", "See that rank")
    usable = [(rank, each) for rank, each in enumerate(ranks) if not each.error]
    differences = [check for other in usable[1:] for check in _differences(usable[0], other)]
    yield from differences
    if not differences and len(usable) == len(ranks):
        count = len(ranks[0].must) + len(ranks[0].should)
        yield Check("ranks agree", "ok", f"{len(ranks)} ranks, on {count} versions, facts and keys")


def _differences(first: tuple[int, Credentials], other: tuple[int, Credentials]) -> Iterator[Check]:
    for status, mine, theirs in (
        (_FAILED, first[1].must, other[1].must),
        (_WARNING, first[1].should, other[1].should),
    ):
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                sides = [(*first, mine.get(key)), (*other, theirs.get(key))]
                yield Check(
                    f"ranks agree on {key}",
                    status,
                    ", ".join(
                        f"rank {rank} (pid {each.pid} on {each.host}) has {value!r}"
                        for rank, each, value in sides
                    ),
                    "Configure and install the same on all ranks",
                )


_FAILED: Status = "failed"
_WARNING: Status = "warning"


def examine(registry: Registry, seconds: float) -> tuple[int, list[Check]]:
    """Compare the ranks of the job that this process is a rank of, then let them talk.

    Returns the rank, and what it has found; all ranks find the same differences.
    Raises `CommError` where the ranks cannot be found.
    """
    config = CommConfig.load()
    loaded = registry.select(config.backend)
    world = world_of_job(replace(config, name="doctor"), loaded.backend)
    with Rendezvous(world, launched_generation()) as rendezvous:
        said = rendezvous.meet(msgspec.json.encode(own(registry)))
    ranks = [msgspec.json.decode(credentials, type=Credentials) for credentials in said]
    found = list(compare(ranks))
    if any(check.status == "failed" for check in found):
        return world.rank, found
    return world.rank, [*found, *_talk(world.rank, world.size, seconds)]


def _talk(rank: int, size: int, seconds: float) -> Iterator[Check]:
    import commlayer

    partner = None if size % 2 and rank == size - 1 else rank ^ 1
    try:
        comm = commlayer.connect()
        if partner is not None:
            figures = selftest.talk(comm, partner, seconds)
        comm.close()
    except (CommError, RuntimeError) as error:
        yield Check("ranks talk", "failed", str(error), "See the text, and docs/stuck.md")
        return
    text = f"{size} ranks connected and closed"
    if partner is not None:
        text += (
            f"; rank {rank} with rank {partner}: small dict there and back "
            f"{figures.round_trip_us:.0f} us, {figures.mib_per_second:.0f} MiB/s"
        )
    yield Check("ranks talk", "ok", text)
