"""The first mount: the library's own communicator on a simulated transport."""

from __future__ import annotations

from typing import Any

from commlayer.backend import World as BackendWorld
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.connector import connect_world
from commlayer.registry import LoadedBackend, Registry
from commlayer.sim.rank import Rank
from commlayer.sim.transport import SimBackend

_NO_PLUGINS = Registry(())


class _Agreed:
    """A store in which every rank has said what this one says: no rank waits for another."""

    def __init__(self) -> None:
        self._value = b""

    def set(self, key: str, value: bytes) -> None:
        self._value = value

    def get(self, key: str) -> bytes:
        return self._value

    def check(self, keys: list[str]) -> bool:
        return True


def connect(rank: Rank, **config: Any) -> Communicator:
    """Connect a rank of a world; `config` are keys of `CommConfig`.

    Progress, ledger, policies and wire are the library's own, on the world's
    runtime; the exchange of settings is taken as done.
    """
    world = rank.world
    return connect_world(
        BackendWorld(rank.index, len(world.ranks), _Agreed(), 60.0),
        LoadedBackend(SimBackend(world), "simulator", ""),
        CommConfig(**config),
        registry=_NO_PLUGINS,
        runtime=rank.runtime,
    )
