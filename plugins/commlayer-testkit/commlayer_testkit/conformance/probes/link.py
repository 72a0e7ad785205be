"""What an experiment sees of the transport: two ranks, joined below the communicator.

A `Subject` says what is probed and is handed to every rank; in the rank it opens a
`Link`.  Three kinds of link have the same operations, so that the same experiment
measures point-to-point operations and broadcasts, of a plugin and of a bare c10d
backend.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlayer.backend import Backend, Endpoint, World
from commlayer.semantics import Semantics, Threads
from commlayer_testkit.conformance.probes.facts import P2P

_CONNECT_SECONDS = 60.0


class Link(ABC):
    """Operations with the other rank; works are the transport's own."""

    device: str

    @abstractmethod
    def isend(self, tensor: Tensor, tag: int = 0) -> Any: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, tag: int = 0) -> Any: ...

    @abstractmethod
    def wait(self, work: Any) -> None: ...

    @abstractmethod
    def poll(self, work: Any) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """End the communicator, pending operations or not."""

    def wait_within(self, work: Any, seconds: float) -> None:
        """The work's own wait with a limit; only where `limits_waits` is true."""
        work.wait(timedelta(seconds=seconds))

    @staticmethod
    def limits_waits(work: Any) -> bool:
        """Whether the native work has a wait with a limit that can be called from here."""
        return isinstance(work, dist.Work)


class EndpointLink(Link):
    """A plugin's endpoint."""

    def __init__(self, endpoint: Endpoint, peer: int, device: str) -> None:
        self._endpoint = endpoint
        self._peer = peer
        self.device = device

    def isend(self, tensor: Tensor, tag: int = 0) -> Any:
        return self._endpoint.isend(tensor, self._peer, tag)

    def irecv(self, tensor: Tensor, tag: int = 0) -> Any:
        return self._endpoint.irecv(tensor, self._peer, tag)

    def wait(self, work: Any) -> None:
        self._endpoint.wait(work)

    def poll(self, work: Any) -> bool:
        return self._endpoint.poll(work)

    def close(self) -> None:
        self._endpoint.close()


class GroupLink(Link):
    """Point-to-point operations of a ``torch.distributed`` group of two ranks."""

    def __init__(self, rank: int, device: str) -> None:
        self._rank = rank
        self._peer = 1 - rank
        self.device = device

    def isend(self, tensor: Tensor, tag: int = 0) -> Any:
        return dist.isend(tensor, self._peer, tag=tag)

    def irecv(self, tensor: Tensor, tag: int = 0) -> Any:
        return dist.irecv(tensor, self._peer, tag=tag)

    def wait(self, work: Any) -> None:
        work.wait()

    def poll(self, work: Any) -> bool:
        return bool(work.is_completed())

    def close(self) -> None:
        dist.destroy_process_group()


class BroadcastLink(GroupLink):
    """Broadcasts instead of sends: the sender is the source.  There are no tags."""

    def isend(self, tensor: Tensor, tag: int = 0) -> Any:
        return dist.broadcast(tensor, src=self._rank, async_op=True)

    def irecv(self, tensor: Tensor, tag: int = 0) -> Any:
        return dist.broadcast(tensor, src=self._peer, async_op=True)


@dataclass(frozen=True)
class Subject:
    """What is probed: a plugin's backend, or a c10d backend by its name there.

    `backend` is ``None`` for a bare c10d backend.  `c10d` names what carries the
    collectives (empty: nothing here does).  `modules` register it where ranks run.
    Instances travel to the ranks by pickle.
    """

    c10d: str
    backend: Backend | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.c10d if self.backend is None else self.backend.name

    @property
    def declared(self) -> Semantics | None:
        return None if self.backend is None else self.backend.semantics

    @property
    def one_thread_only(self) -> bool:
        """Whether the transport may only be called from the thread that opened it."""
        return self.declared is not None and self.declared.threads is Threads.FUNNELED

    def devices(self) -> tuple[str, ...]:
        """Declared or registered device types that exist here, in their order."""
        if self.declared is not None:
            candidates = self.declared.devices
        else:
            candidates = tuple(dist.Backend.backend_capability.get(self.c10d, ["cpu"]))
        return tuple(kind for kind in candidates if _present(kind))

    def versions(self) -> dict[str, str]:
        versions = {"torch": str(torch.__version__)}
        if self.backend is not None:
            versions.update(self.backend.versions())
        return versions

    def launcher(self, size: int) -> Sequence[str]:
        """The command of the backend's own launcher for `size` ranks; empty if it has none."""
        return () if self.backend is None else self.backend.launcher(size)

    def rank_in_job(self) -> int:
        """The number of the calling process in the job of that launcher."""
        world = None if self.backend is None else self.backend.job(_CONNECT_SECONDS)
        assert world is not None, f"backend {self.name!r} finds no job of its launcher"
        return world.rank

    def open(self, kind: str, rank: int, store: Any, device: str) -> Link:
        """Connect this rank with the other one; blocks until both have come."""
        if kind == P2P and self.backend is not None:
            world = self.backend.job(_CONNECT_SECONDS) or World(rank, 2, store, _CONNECT_SECONDS)
            transport = self.backend.open(world, self.options)
            pair = getattr(transport, "pair", None)
            endpoint = transport.endpoint("probe") if pair is None else pair("probe", 1 - rank)
            return EndpointLink(endpoint, 1 - rank, device)
        dist.init_process_group(
            self.c10d,
            store=store,
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=_CONNECT_SECONDS),
        )
        return (GroupLink if kind == P2P else BroadcastLink)(rank, device)


def subject_of(backend: Backend, options: Mapping[str, Any]) -> Subject:
    """The subject for a plugin's backend; collectives by the c10d backend of its name, if any."""
    return Subject(backend.name if _c10d_available(backend.name) else "", backend, options)


def subject_of_c10d(name: str) -> Subject:
    """The subject for a bare c10d backend.

    `name` is what ``init_process_group`` takes; ``module:name`` imports the module
    that registers it first.  Raises `ValueError` where torch has no such backend.
    """
    module, _, name = name.rpartition(":")
    if module:
        importlib.import_module(module)
    if not _c10d_available(name):
        raise ValueError(f"torch {torch.__version__} has no c10d backend {name!r} here")
    return Subject(name, modules=(module,) if module else ())


def _c10d_available(name: str) -> bool:
    return dist.is_available() and dist.is_backend_available(name)


def _present(kind: str) -> bool:
    if kind == "cpu":
        return True
    module = getattr(torch, kind, None)
    return module is not None and module.is_available()
