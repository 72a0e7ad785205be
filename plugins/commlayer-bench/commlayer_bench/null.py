"""A transport that moves nothing: sends are complete at once, receives never.

What is left is the cost of the library itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar

from commlayer_testkit.local import MemoryStore
from torch import Tensor

from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.loading import LoadedBackend
from commlayer.registry import Registry
from commlayer.semantics import (
    Completion,
    DroppedWork,
    OperationSemantics,
    Order,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    Threads,
)


def semantics(poll: Poll) -> Semantics:
    """The facts of the null transport, with a poll that tells or one that must not be asked."""
    return Semantics(
        p2p=OperationSemantics(
            poll=poll,
            wait_repeatable=poll is Poll.EXACT,
            dropped_work=DroppedWork.CONTINUES,
            post_may_block=PostMayBlock.NEVER,
            order=Order.PER_TAG,
            max_outstanding_per_pair=0,
            completion=Completion.LOCAL,
            eager_bytes=1 << 30,
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.MULTIPLE,
        tags=True,
    )


@contextmanager
def connected(poll: Poll, **settings: Any) -> Iterator[Communicator]:
    """Rank 0 of two that are connected by nothing, both in this process."""
    backend = _NullBackend(poll)
    store = MemoryStore()
    config = CommConfig(**settings)

    def connect(rank: int) -> Communicator:
        world = World(rank, 2, store, config.connect_timeout)
        loaded = LoadedBackend(backend, "commlayer", "")
        return connect_world(world, loaded, config, registry=Registry(entry_points=[]))

    with ThreadPoolExecutor(2) as pool:
        comms = list(pool.map(connect, range(2)))
    try:
        yield comms[0]
    finally:
        backend.cut.set()
        for comm in comms:
            comm.close()


class _NullEndpoint(Endpoint):
    """Works are whether they are complete."""

    def __init__(self, cut: threading.Event) -> None:
        self._cut = cut

    def isend(self, tensor: Tensor, dst: int, tag: int) -> bool:
        return True

    def irecv(self, tensor: Tensor, src: int, tag: int) -> bool:
        return False

    def wait(self, work: bool) -> None:
        if not work:
            self._cut.wait()
            raise RuntimeError("the connection is cut")

    def poll(self, work: bool) -> bool:
        if not work and self._cut.is_set():
            raise RuntimeError("the connection is cut")
        return work


class _NullTransport(Transport):
    def __init__(self, cut: threading.Event) -> None:
        self._cut = cut

    def endpoint(self, name: str) -> Endpoint:
        return _NullEndpoint(self._cut)


class _NullBackend(Backend):
    name: ClassVar[str] = "null"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)

    def __init__(self, poll: Poll) -> None:
        self.semantics = semantics(poll)  # type: ignore[misc]
        self.cut = threading.Event()

    def viability(self) -> Viability:
        return Viability(True, "it needs nothing")

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return _NullTransport(self.cut)
