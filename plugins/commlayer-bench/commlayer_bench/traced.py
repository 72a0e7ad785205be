"""A backend whose native calls leave time stamps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.bootstrap.connector import connect_world
from commlayer.bootstrap.worlds import world_of_group
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.registry import default_registry


class Stamp(NamedTuple):
    """A native call, in seconds of the clock that all processes of a machine share."""

    call: Literal["isend", "irecv", "wait"]
    begin: float
    end: float


def connect(settings: Mapping[str, Any], stamps: list[Stamp]) -> Communicator:
    """Connect the ranks of the ``torch.distributed`` job; native calls are added to `stamps`."""
    config = CommConfig.load(settings)
    registry = default_registry()
    loaded = registry.select(config.backend)
    traced = replace(loaded, backend=_Traced(loaded.backend, stamps))
    return connect_world(world_of_group(config, None), traced, config, registry=registry)


class _TracedEndpoint(Endpoint):
    def __init__(self, inner: Endpoint, stamps: list[Stamp]) -> None:
        self._inner = inner
        self._stamps = stamps
        self.poll = inner.poll  # type: ignore[method-assign]
        self.close = inner.close  # type: ignore[method-assign]

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        begin = time.perf_counter()
        work = self._inner.isend(tensor, dst, tag)
        self._stamps.append(Stamp("isend", begin, time.perf_counter()))
        return work

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        begin = time.perf_counter()
        work = self._inner.irecv(tensor, src, tag)
        self._stamps.append(Stamp("irecv", begin, time.perf_counter()))
        return work

    def wait(self, work: Any) -> None:
        begin = time.perf_counter()
        self._inner.wait(work)
        self._stamps.append(Stamp("wait", begin, time.perf_counter()))


class _TracedTransport(Transport):
    def __init__(self, inner: Transport, stamps: list[Stamp]) -> None:
        self._inner = inner
        self._stamps = stamps
        self.close = inner.close  # type: ignore[method-assign]

    def endpoint(self, name: str) -> Endpoint:
        return _TracedEndpoint(self._inner.endpoint(name), self._stamps)


class _Traced(Backend):
    """As the backend in it: name and facts are its own."""

    def __init__(self, inner: Backend, stamps: list[Stamp]) -> None:
        self._inner = inner
        self._stamps = stamps
        self.name = inner.name  # type: ignore[misc]
        self.plugin_api = inner.plugin_api  # type: ignore[misc]
        self.semantics = inner.semantics  # type: ignore[misc]

    def viability(self) -> Viability:
        return self._inner.viability()

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return _TracedTransport(self._inner.open(world, options), self._stamps)
