"""Ranks that wait for each other in different groups.

One rank connects group A first and then B, another B first: each waits for the other, and
neither comes.  In threads that is well, so what counts is what all threads of a process
connect.  Each process says so in the store, again and again, while it waits.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from commlayer.backend import World
from commlayer.bootstrap.launch import refusal
from commlayer.forks import let_go_in_child

_EVERY_SECONDS = 0.5

_connecting: dict[str, Counter[str]] = {}
"""Groups that threads of this process connect, by what they have in common."""
_guard = let_go_in_child(threading.Lock())
"""Guards `_connecting`."""
os.register_at_fork(after_in_child=_connecting.clear)  # a child has none of those threads
_beats = itertools.count(1)


class CrossingWait(msgspec.Struct, frozen=True):
    """What a process connects.  `beat` changes while it lives and waits."""

    groups: tuple[str, ...]
    beat: int
    pid: int


_decoder = msgspec.msgpack.Decoder(CrossingWait)


class Crossing:
    """One call's view of what the other ranks connect; nothing where the world is no group."""

    def __init__(self, world: World, pid: int) -> None:
        self._common, _, self._group = world.name.rpartition("/ranks ")
        members = self._group.partition("/")[0].split(",") if self._common else []
        self._rank = members[world.rank] if self._common else ""
        self._pid = pid
        self._others = [rank for rank in members if rank != self._rank]
        self._first: dict[str, CrossingWait] = {}
        # Half of the limit: another thread of either rank may still be about to connect.
        self._refuse_at = time.monotonic() + world.remaining() / 2
        self._due = time.monotonic() + _EVERY_SECONDS

    def enter(self) -> None:
        """Note that this process connects the group."""
        if self._common:
            with _guard:
                _connecting.setdefault(self._common, Counter())[self._group] += 1

    def leave(self) -> None:
        """Note that it does no longer."""
        if self._common:
            with _guard:
                _connecting[self._common] -= Counter([self._group])
                if not _connecting[self._common]:
                    del _connecting[self._common]

    def due(self) -> bool:
        """Whether it is time to `look`."""
        return bool(self._common) and time.monotonic() >= self._due

    def look(self, store: Any) -> None:
        """Say what this process connects, and hear it of the others; raises where they cross."""
        self._due = time.monotonic() + _EVERY_SECONDS
        outer = getattr(store, "underlying_store", store)
        with _guard:
            mine = set(_connecting[self._common])
        said = CrossingWait(tuple(sorted(mine)), next(_beats), self._pid)
        outer.set(self._key(self._rank), msgspec.msgpack.encode(said))
        for rank in self._others:
            key = self._key(rank)
            if not outer.check([key]):
                continue
            other = _decoder.decode(outer.get(key))
            first = self._first.setdefault(rank, other)
            alive = (first.pid, first.beat) != (other.pid, other.beat)
            if first.pid != other.pid:
                self._first[rank] = other
            if alive and not mine & set(other.groups) and time.monotonic() >= self._refuse_at:
                raise refusal(
                    f"rank {self._rank} (pid {self._pid}) connects with ranks {_list(mine)} and "
                    f"waits for rank {rank} (pid {other.pid}), which connects with ranks "
                    f"{_list(other.groups)} instead",
                    "Have all members connect the same groups, and in the same order or all at "
                    "once in threads",
                )

    def _key(self, rank: str) -> str:
        return f"crossing/{self._common}/{rank}"


def _list(groups: Iterable[str]) -> str:
    return " and with ranks ".join(sorted(groups))
