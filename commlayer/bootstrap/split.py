"""Communicators of some of the ranks of a communicator, without a launcher or torch's groups."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from commlayer.backend import World
from commlayer.bootstrap.launch import launched_generation
from commlayer.bootstrap.rendezvous import Rendezvous
from commlayer.bootstrap.stores import prefixed
from commlayer.bootstrap.turns import turn
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.errors import ConfigError

_MOST_IN_NAME = 8
"""Ranks that the name of a connection lists, in full."""


class Splitter:
    """Splits one communicator: the store of its ranks tells the members of each part."""

    def __init__(
        self,
        world: World,
        config: CommConfig,
        connect: Callable[[World, CommConfig], Communicator],
    ) -> None:
        self._world = world
        self._config = config
        self._connect = connect

    def by_ranks(self, ranks: Sequence[int], name: str) -> Communicator:
        """The communicator of `ranks`, which all of them ask for, numbered in that order."""
        members = self._checked(ranks)
        listed = ",".join(map(str, members))
        of = f"ranks {listed}"
        world = replace(
            self._fresh(of),
            rank=members.index(self._world.rank),
            size=len(members),
        )
        short = listed if len(members) <= _MOST_IN_NAME else f"{members[0]},... {len(members)}"
        name = name or f"{self._config.name}/{short}"
        with turn(world, None):
            return self._connect(world, msgspec.structs.replace(self._config, name=name))

    def by_color(self, color: int | str | None, name: str) -> Communicator | None:
        """The communicator of the ranks of the same color; ``None`` for a rank without one."""
        if isinstance(color, bool) or not (color is None or isinstance(color, str)):
            color = _integer(color, "color")
        world = self._fresh("colors")
        with turn(world, None), Rendezvous(world, launched_generation()) as rendezvous:
            said = [
                msgspec.msgpack.decode(each)
                for each in rendezvous.meet(msgspec.msgpack.encode(color))
            ]
        if color is None:
            return None
        members = [rank for rank, other in enumerate(said) if other == color]
        return self.by_ranks(members, name or f"{self._config.name}/{color}")

    def _fresh(self, of: str) -> World:
        """The ranks, about to meet below the store that they share."""
        timeout = self._config.connect_timeout
        return World(
            self._world.rank,
            self._world.size,
            prefixed(self._world.client(), of),
            timeout,
            f"{self._world.name}/{of}",
            time.monotonic() + timeout,
        )

    def _checked(self, ranks: Sequence[int]) -> list[int]:
        try:
            members = [_integer(rank, "ranks") for rank in ranks]
        except TypeError:
            raise _wrong(f"{ranks!r} are no ranks") from None
        if len(set(members)) != len(members):
            raise _wrong(f"{members} names a rank twice")
        beyond = [rank for rank in members if not 0 <= rank < self._world.size]
        if beyond:
            raise _wrong(f"{beyond[0]} is no rank of this communicator of {self._world.size}")
        if self._world.rank not in members:
            raise _wrong(f"this rank, {self._world.rank}, is not among {members}")
        return members


def _integer(value: Any, what: str) -> int:
    if isinstance(value, bool):
        raise _wrong(f"{what}: {value!r} is not an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong(f"{what}: {value!r} is not an integer") from None


def _wrong(cause: str) -> ConfigError:
    return ConfigError(
        "split",
        cause,
        "Have each member pass the same list of ranks, or every rank a color (an int or str)",
    )
