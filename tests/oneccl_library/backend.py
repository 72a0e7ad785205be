"""The backend ``oneccl_cpu``: oneCCL's own library as a device transport, on host memory.

For tests only.  Host memory plays the device, so every payload goes over oneCCL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, ClassVar

from torch import Tensor

from commlayer.backend import Viability, World
from commlayer.device.backend import PairEndpoint, StreamBackend, StreamTransport
from commlayer.device.device import DeviceRuntime
from commlayer.semantics import (
    OperationSemantics,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    Threads,
)
from oneccl_library import library
from oneccl_library.host_runtime import HostRuntime
from oneccl_library.library import Group, Work
from oneccl_library.order import OrderedGroups
from oneccl_library.prepare import VERSION

_HERE = "measured in test_oneccl_library.py"


class _OrderedGroup:
    """A communicator that may not be made yet: the first operation on it waits for that."""

    def __init__(self, made: Future[Group]) -> None:
        self._made = made

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        return self._made.result().send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        return self._made.result().recv(tensors, src, tag)


class _Transport(StreamTransport):
    def __init__(self, backend: OneCclCpuBackend, world: World) -> None:
        super().__init__(backend, world)
        self._groups = OrderedGroups(world.store, world.rank)

    def pair(self, name: str, peer: int) -> PairEndpoint:
        low, high = sorted((self.rank, peer))
        made = self._groups.group(f"{name}/{low}-{high}")
        return PairEndpoint(_OrderedGroup(made), int(self.rank == low))

    def close(self) -> None:
        self._groups.close()


class OneCclCpuBackend(StreamBackend):
    """Headers go over ``gloo``; two ranks meet on a communicator for each lane."""

    name: ClassVar[str] = "oneccl_cpu"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    priority: ClassVar[int] = -100
    semantics: ClassVar[Semantics] = Semantics(
        p2p=OperationSemantics(
            poll=Poll.EXACT,
            wait_repeatable=True,
            post_may_block=PostMayBlock.FIRST_USE,
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.SERIALIZED,
    )
    sources: ClassVar[Mapping[str, str]] = {
        "p2p.poll": _HERE,
        "p2p.wait_repeatable": _HERE,
        "p2p.post_may_block": f"{_HERE}: making a communicator waits for the peer, a send does not",
        "threads": f"{_HERE}: waits and posts of several threads, one a communicator",
        "progress": "oneCCL's own worker threads",
    }

    def viability(self) -> Viability:
        if library.FOLDER not in os.environ:
            return Viability(False, "oneCCL's own library is not here", "make test-oneccl")
        return Viability(True, "oneCCL's own library, host memory")

    def versions(self) -> Mapping[str, str]:
        return {"oneCCL's own library, host memory": VERSION}

    def device(self) -> DeviceRuntime:
        return HostRuntime()

    def open(self, world: World, options: Mapping[str, Any]) -> StreamTransport:
        super().open(world, options)  # refuses options
        return _Transport(self, world)

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        raise NotImplementedError("made in order by the transport")
