"""One trace, run on a real transport and on its profile.

A trace is one list of steps for each of two ranks; running it gives what each
rank observed.  `sync` lets both ranks reach the same point on a channel of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

Step = tuple[Any, ...]
Trace = tuple[list[Step], list[Step]]


class Channel(Protocol):
    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any: ...

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any: ...


TRACES: dict[str, Trace] = {
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
    "first in, first out": (
        [("send", "a", 1, 0), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b"), ("poll", "b")],
        [("recv", "a", 0), ("recv", "b", 0), ("wait", "a"), ("wait", "b"), ("poll", "a")],
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
    "receives waited in the other order": (
        [("send", "a", 1, 0), ("send", "b", 2, 0), ("wait", "a"), ("wait", "b")],
        [("recv", "a", 0), ("recv", "b", 0), ("wait", "b"), ("poll", "a"), ("wait", "a")],
    ),
    "bytes are read when the peer is ready": (
        [("send", "s", 1, 0), ("write", "s", 9), ("sync",), ("wait", "s")],
        [("sync",), ("recv", "r", 0), ("wait", "r")],
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


def follow(
    steps: list[Step],
    rank: int,
    data: Channel,
    wait: Callable[[Any], Any],
    sync: Callable[[], None],
) -> list[Any]:
    """Run one rank's steps; return what it observed."""
    works: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    received: set[str] = set()
    seen: list[Any] = []
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
            seen.append((name, works[name].is_completed()))
        elif what == "wait":
            wait(works[name])
            if name in received:
                seen.append((name, tensors[name].tolist()))
    return seen


def on_gloo(rank: int, path: str) -> dict[str, list[Any]]:
    """Follow every trace on real gloo; the other rank is another process."""
    import torch.distributed as dist

    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=60)

    def group(name: str) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, limit)

    class Gloo:
        def __init__(self, name: str) -> None:
            self._group = group(name)

        def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
            return self._group.send([tensor], dst, tag)

        def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
            return self._group.recv([tensor], src, tag)

    barrier = group("sync")
    seen = {}
    for number, (name, trace) in enumerate(TRACES.items()):
        seen[name] = follow(
            trace[rank],
            rank,
            Gloo(f"trace {number}"),
            lambda w: w.wait(),
            lambda: barrier.barrier().wait(),
        )
    barrier.barrier().wait()
    return seen


if __name__ == "__main__":
    import json

    print(json.dumps(on_gloo(int(sys.argv[1]), sys.argv[2])))
