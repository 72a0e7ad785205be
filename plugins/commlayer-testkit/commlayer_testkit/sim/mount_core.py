"""The first mount: the library's own communicator on a simulated transport."""

from __future__ import annotations

from typing import Any

from pluggy import HookRelay

from commlayer.backend import Backend
from commlayer.backend import World as BackendWorld
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry
from commlayer_testkit.sim.mount_device import SimStore, SimStreamBackend
from commlayer_testkit.sim.profiles import Profile
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.transport import SimBackend


class _NoPlugins(Registry):
    """No backend, and one empty set of hooks."""

    def __init__(self) -> None:
        super().__init__(())
        self._relay = super().hooks()

    def hooks(self, selected: LoadedBackend | None = None, *specifications: type) -> HookRelay:
        return self._relay


_NO_PLUGINS = _NoPlugins()


class NoStore:
    """Simulated ranks have met already, and ask no store."""

    def set(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str) -> bytes:
        raise NotImplementedError

    def check(self, keys: list[str]) -> bool:
        raise NotImplementedError


def mount(
    rank: Rank,
    backend: Backend,
    *,
    beside: Backend | None = None,
    store: Any = None,
    **config: Any,
) -> Communicator:
    """Connect a rank of a world over `backend`; `config` are keys of `CommConfig`.

    Progress, ledger, policies and wire are the library's own, on the world's
    runtime, with fewer headers received ahead by default, for fewer schedules; the
    exchange of settings is taken as done.  `beside` is the host
    transport of a device transport.
    """
    registry: Registry = _NO_PLUGINS
    if beside is not None:
        registry = Registry(())
        registry.add_backend(beside)
    return connect_world(
        BackendWorld(rank.index, len(rank.world.ranks), store or NoStore(), 60.0),
        LoadedBackend(backend, "simulator", ""),
        CommConfig(**{"headers_ahead": 2, "device_lanes_at_connect": 0, **config}),
        registry=registry,
        runtime=rank.runtime,
    )


def connect(rank: Rank, **config: Any) -> Communicator:
    """Connect a rank on its world's transport."""
    return mount(rank, SimBackend(rank.world), **config)


def connect_device(rank: Rank, host: Profile, **config: Any) -> Communicator:
    """As `connect`, on the device transport of the profile beside the host transport `host`."""
    world = rank.world
    return mount(
        rank,
        SimStreamBackend(rank, world.profile),
        beside=SimBackend(world, host),
        store=SimStore(rank),
        **config,
    )
