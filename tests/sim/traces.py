"""Traces, run on a real transport and on its profile.

A trace is one list of steps for each of two ranks; running it gives what each
rank observed.  `sync` lets both ranks reach the same point on a channel of its own.
Bytes are observed in runs of the same value: ``[value, count]``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any, Protocol

import torch

Step = tuple[Any, ...]
Trace = tuple[list[Step], list[Step]]


class Work(Protocol):
    def wait(self) -> Any: ...

    def is_completed(self) -> bool: ...


class Channel(Protocol):
    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any: ...

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any: ...


COMMON: dict[str, Trace] = {
    "first in, first out": (
        [("send", "a", 1, 0), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b"), ("poll", "b")],
        [("recv", "a", 0), ("recv", "b", 0), ("wait", "a"), ("wait", "b"), ("poll", "a")],
    ),
    "receives waited in the other order": (
        [("send", "a", 1, 0), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b")],
        [("recv", "a", 0), ("recv", "b", 0), ("wait", "b"), ("wait", "a"), ("poll", "a")],
    ),
    "a short message leaves the tail of a longer receive": (
        [("send", "s", 5, 0, 4), ("wait", "s")],
        [("recv", "r", 0, 8), ("wait", "r")],
    ),
    "both ranks send first": (
        [("send", "s", 1, 0), ("recv", "r", 0), ("wait", "r"), ("wait", "s"), ("poll", "s")],
        [("send", "s", 2, 0), ("recv", "r", 0), ("wait", "r"), ("wait", "s"), ("poll", "s")],
    ),
}
WRITES_EARLY = "bytes are read when the peer is ready"
GLOO: dict[str, Trace] = {
    **COMMON,
    "the poll says no until waited": (
        [
            ("send", "s", 1, 0),
            ("poll", "s"),
            ("sync",),
            ("poll", "s"),
            ("wait", "s"),
            ("poll", "s"),
        ],
        [("recv", "r", 0), ("sync",), ("poll", "r"), ("wait", "r"), ("poll", "r")],
    ),
    "the poll of another receive says no until it is waited": (
        [("send", "a", 1, 0), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b")],
        [("recv", "a", 0), ("recv", "b", 0), ("wait", "b"), ("poll", "a"), ("wait", "a")],
    ),
    "tags match independently": (
        [
            ("send", "a", 1, 1),
            ("send", "b", 2, 2),
            ("wait", "b"),
            ("poll", "a"),
            ("sync",),
            ("wait", "a"),
        ],
        [("recv", "b", 2), ("wait", "b"), ("sync",), ("recv", "a", 1), ("wait", "a")],
    ),
    WRITES_EARLY: (
        [("send", "s", 1, 0), ("write", "s", 9), ("sync",), ("wait", "s")],
        [("sync",), ("recv", "r", 0), ("wait", "r")],
    ),
}

EAGER, LARGE = 4096, 1 << 19
"""Bytes that the profile of MPI sends eagerly, and that MPICH does on no transport."""
MPI: dict[str, Trace] = {
    **COMMON,
    "an eager send completes before its receive, and its source is free": (
        [("send", "s", 1, 0, EAGER), ("until", "s"), ("write", "s", 9), ("sync",), ("wait", "s")],
        [("sync",), ("recv", "r", 0, EAGER), ("wait", "r")],
    ),
    "a large send waits for its receive, and needs no wait": (
        [("send", "s", 1, 0, LARGE), ("poll", "s"), ("sync",), ("until", "s"), ("sync",)],
        [("sync",), ("recv", "r", 0, LARGE), ("until", "r"), ("sync",)],
    ),
    "a receive is polled before its send, and needs no wait": (
        [("recv", "r", 0), ("poll", "r"), ("sync",), ("until", "r")],
        [("sync",), ("send", "s", 3, 0), ("until", "s")],
    ),
    "a work is waited twice": (
        [("send", "s", 1, 0, LARGE), ("wait", "s"), ("wait", "s"), ("poll", "s")],
        [("recv", "r", 0, LARGE), ("wait", "r"), ("wait", "r"), ("poll", "r")],
    ),
    "a large message of one tag lets another pass": (
        [
            ("send", "a", 1, 1, LARGE),
            ("send", "b", 2, 2, LARGE),
            ("wait", "b"),
            ("poll", "a"),
            ("sync",),
            ("wait", "a"),
        ],
        [
            ("recv", "b", 2, LARGE),
            ("wait", "b"),
            ("sync",),
            ("recv", "a", 1, LARGE),
            ("wait", "a"),
        ],
    ),
    "a message longer than its receive is an error, and the next arrives": (
        [("send", "a", 1, 0, 16), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b")],
        [("recv", "a", 0, 8), ("fails", "a"), ("recv", "b", 0), ("wait", "b")],
    ),
}


def follow(
    steps: list[Step],
    rank: int,
    data: Channel,
    sync: Callable[[], None],
    pause: Callable[[], None],
) -> list[Any]:
    """Run one rank's steps; return what it observed."""
    works: dict[str, Work] = {}
    tensors: dict[str, torch.Tensor] = {}
    received: set[str] = set()
    seen: list[Any] = []

    def complete(name: str) -> None:
        if name in received:
            values = tensors[name].tolist()
            seen.append([name, [[value, len(list(run))] for value, run in groupby(values)]])

    for step in steps:
        what, *rest = step
        if what == "sync":
            sync()
            continue
        name = rest[0]
        if what == "send":
            size = rest[3] if len(rest) > 3 else 8
            tensors[name] = torch.full((size,), rest[1], dtype=torch.uint8)
            works[name] = data.isend(tensors[name], 1 - rank, rest[2])
        elif what == "recv":
            size = rest[2] if len(rest) > 2 else 8
            tensors[name] = torch.zeros(size, dtype=torch.uint8)
            works[name] = data.irecv(tensors[name], 1 - rank, rest[1])
            received.add(name)
        elif what == "write":
            tensors[name].fill_(rest[1])
        elif what == "poll":
            seen.append([name, works[name].is_completed()])
        elif what == "until":
            while not works[name].is_completed():
                pause()
            seen.append([name, True])
            complete(name)
        elif what == "wait":
            works[name].wait()
            complete(name)
        elif what == "fails":
            try:
                works[name].wait()
            except Exception:
                seen.append([name, "failed"])
    return seen
