"""What each rank tells the others before anything is opened, and whether they agree."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from commlayer.bootstrap.launch import refusal
from commlayer.liveness.meeting import Contact
from commlayer.semantics import Semantics


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank says.  What must be equal on all ranks is in `_MUST_AGREE`.

    `contact` is where it listens for liveness connections; ``None`` if it does without.
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
    contact: Contact | None = None

    @staticmethod
    def whereabouts() -> tuple[str, int]:
        return socket.gethostname(), os.getpid()

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_decoder = msgspec.msgpack.Decoder(Hello)
_MUST_AGREE = ("wire_version", "backend", "channels", "inline_bytes", "allow_pickle", "facts")


def agree(rank: int, mine: Hello, said: Sequence[bytes]) -> dict[int, Hello]:
    """The hellos of all ranks, of which this is `rank`, from what they have `said`.

    Raises `CommError` (CONFIG) naming the first rank that differs, what differs, and
    both values.
    """
    hellos = {}
    for other, data in enumerate(said):
        try:
            hello = hellos[other] = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise refusal(
                f"rank {rank} (pid {mine.pid} on {mine.host}, wire version "
                f"{mine.wire_version}) and rank {other} ({_stranger(data)}) run versions of "
                f"commlayer that greet each other differently ({error})",
                f"Install commlayer {mine.version} on all ranks",
            ) from error
        for name in _MUST_AGREE:
            here, there = getattr(mine, name), getattr(hello, name)
            if here != there:
                raise refusal(
                    f"rank {rank} (pid {mine.pid} on {mine.host}) and rank {other} "
                    f"(pid {hello.pid} on {hello.host}) differ in {_difference(name, here, there)}",
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


def _difference(name: str, mine: Any, theirs: Any) -> str:
    if isinstance(mine, Semantics):
        return _difference(name, mine.facts(), theirs.facts())
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in mine:
            if mine[key] != theirs.get(key):
                return _difference(f"{name}.{key}", mine[key], theirs.get(key))
    return f"{name}: {mine!r} and {theirs!r}"
