"""A transport between ranks of one process, for unit tests.

Every rank is used from threads of the test's own process.  The transport does
what its declared semantics say at their weakest (a dropped work loses its
message, a second wait is an error) and holds the core to them: every call that
the semantics do not allow is kept in `Hub.violations`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.errors import CommError
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

WAITED = Semantics(
    p2p=OperationSemantics(
        poll=Poll.NEVER_BEFORE_WAIT,
        dropped_work=DroppedWork.LOSES_MESSAGE,
        post_may_block=PostMayBlock.NEVER,
        order=Order.PER_TAG,
        max_outstanding_per_pair=0,
        completion=Completion.MATCHED,
    ),
    progress=Progress.AUTONOMOUS,
    threads=Threads.MULTIPLE,
    tags=True,
)
"""Completion shows only to who waits in the transport: waiter lanes."""

SERIALIZED = replace(
    WAITED,
    p2p=replace(WAITED.p2p, poll=Poll.EXACT),
    progress=Progress.ONLY_IN_CALLS,
    threads=Threads.SERIALIZED,
)
"""Polled, from any one thread at a time."""

EAGER = replace(
    SERIALIZED,
    p2p=replace(SERIALIZED.p2p, completion=Completion.LOCAL, eager_bytes=1 << 16),
)
"""Sends complete before anybody has asked for the message."""

FUNNELED = replace(SERIALIZED, threads=Threads.FUNNELED)
"""Polled, from the connecting thread only."""


_memmove = ctypes.memmove

DEFAULTS: dict[str, Any] = {
    "connect_timeout": 20.0,
    "close_timeout": 5.0,
    "check_lifetime": True,
    "inline_bytes": 8192,
}
"""Configuration of every rank, unless a test gives another."""


class MemoryStore:
    """Keys to bytes, shared by the ranks of one hub."""

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.items[key] = value

    def get(self, key: str) -> bytes:
        return self.items[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.items for key in keys)


class Work:
    """One native operation.  It owns its tensor; the hub only knows it while somebody holds it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.waits = 0


class Hub:
    """Where the ranks meet: matches sends and receives in order per source, target and tag."""

    def __init__(self, size: int, semantics: Semantics = WAITED) -> None:
        self.size = size
        self.semantics = semantics
        self.store = MemoryStore()
        self.violations: list[str] = []
        self.posted: Counter[str] = Counter()
        self.closed: Counter[int] = Counter()
        self.most_outstanding = 0
        self._lock = threading.Lock()
        self._queues: dict[Any, deque[Callable[[], Work | None]]] = defaultdict(deque)
        self._dead: set[int] = set()

    def post(self, way: str, src: int, dst: int, tag: int, tensor: Tensor) -> Work:
        work = Work(tensor)
        with self._lock:
            if self._dead & {src, dst}:
                raise RuntimeError("connection closed by peer")
            self.posted[way] += 1
            queued: Callable[[], Work | None] = weakref.ref(work)
            if way == "send" and tensor.numel() <= self.semantics.p2p.eager_bytes:
                copied = Work(tensor.clone())
                queued = lambda: copied  # noqa: E731
                work.done.set()
            self._queues[way, src, dst, tag].append(queued)
            sends, receives = (self._queues[w, src, dst, tag] for w in ("send", "recv"))
            if way == "send":
                self.most_outstanding = max(self.most_outstanding, len(sends))
            while sends and receives:
                self._deliver(sends.popleft()(), receives.popleft()())
        return work

    def _deliver(self, source: Work | None, target: Work | None) -> None:
        if source is None or target is None:
            self.violations.append("a pending work was dropped")
            return
        if source.tensor.numel() > target.tensor.numel():
            self.violations.append("a message is larger than the buffer of its receive")
            return
        _memmove(target.tensor.data_ptr(), source.tensor.data_ptr(), source.tensor.numel())
        source.done.set()
        target.done.set()

    def fail(self, rank: int, error: BaseException) -> None:
        """Every pending work of `rank` raises `error`."""
        self._fail(error, lambda owner, peer: owner == rank)

    def kill(self, rank: int) -> None:
        """Every pending and later work of other ranks with `rank` raises."""
        with self._lock:
            self._dead.add(rank)
        self._fail(RuntimeError("connection reset by peer"), lambda owner, peer: peer == rank)

    def _fail(self, error: BaseException, concerns: Callable[[int, int], bool]) -> None:
        with self._lock:
            for (way, src, dst, _), queue in self._queues.items():
                if concerns(*((src, dst) if way == "send" else (dst, src))):
                    for work in filter(None, (reference() for reference in queue)):
                        work.error = error
                        work.done.set()
                    queue.clear()


class LocalEndpoint(Endpoint):
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank
        self._owner = threading.get_ident()
        self._inside = threading.Lock()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        threads = self._hub.semantics.threads
        if threads is Threads.FUNNELED and threading.get_ident() != self._owner:
            self._hub.violations.append("a call from another thread than the owner's")
        if threads is Threads.MULTIPLE:
            yield
        elif self._inside.acquire(blocking=False):
            try:
                yield
            finally:
                self._inside.release()
        else:
            self._hub.violations.append("two calls at once")
            yield

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Work:
        with self._entered():
            work = self._hub.post("send", self._rank, dst, tag, tensor)
        if self._hub.semantics.p2p.post_may_block is not PostMayBlock.NEVER:
            work.done.wait()
        return work

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Work:
        with self._entered():
            return self._hub.post("recv", src, self._rank, tag, tensor)

    def wait(self, work: Work) -> None:
        with self._entered():
            work.waits += 1
            if work.waits > 1:
                self._hub.violations.append("a second wait")
            work.done.wait()
            if work.error is not None:
                raise work.error

    def poll(self, work: Work) -> bool:
        with self._entered():
            if self._hub.semantics.p2p.poll is not Poll.EXACT:
                self._hub.violations.append("a poll that is not EXACT was asked")
            return work.done.is_set()

    def close(self) -> None:
        self._hub.closed[self._rank] += 1


class LocalTransport(Transport):
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub = hub
        self._rank = rank

    def endpoint(self, name: str) -> Endpoint:
        return LocalEndpoint(self._hub, self._rank)


class LocalBackend(Backend):
    name = "local"
    plugin_api = (1, 1)

    def __init__(self, hub: Hub, semantics: Semantics) -> None:
        self._hub = hub
        self.semantics = semantics  # type: ignore[misc]

    def viability(self) -> Viability:
        return Viability(True, "it is in this process")

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return LocalTransport(self._hub, world.rank)


def connect_rank(
    hub: Hub,
    rank: int,
    *,
    semantics: Semantics | None = None,
    backend: Backend | None = None,
    registry: Registry | None = None,
    **settings: Any,
) -> Communicator:
    """Connect one rank of `hub`; blocks until the others connect.

    `backend` stands in for the hub's own.  `settings` are configuration keys; a policy may
    also be given as an object.
    """
    policies = {
        key: settings.pop(key)
        for key in ("retention", "reaping")
        if not isinstance(settings.get(key, ""), str)
    }
    config = CommConfig(**{**DEFAULTS, **settings})
    return connect_world(
        World(rank, hub.size, hub.store, config.connect_timeout),
        LoadedBackend(backend or LocalBackend(hub, semantics or hub.semantics), "this process", ""),
        config,
        registry=registry or Registry(entry_points=[]),
        **policies,
    )


def on_every_rank(hub: Hub, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` on a thread per rank; raises the first error of one."""
    with ThreadPoolExecutor(hub.size) as pool:
        return list(pool.map(body, range(hub.size)))


@contextmanager
def connected(
    size: int = 2, semantics: Semantics = WAITED, *, hub: Hub | None = None, **settings: Any
) -> Iterator[list[Communicator]]:
    """Communicators of all ranks of a fresh hub; closed, and the hub checked, at the end."""
    hub = hub or Hub(size, semantics)
    comms = on_every_rank(hub, lambda rank: connect_rank(hub, rank, **settings))
    try:
        yield comms
    finally:
        for comm in comms:
            with suppress(CommError):
                comm.close()
        for rank in range(hub.size):
            hub.kill(rank)
    assert hub.violations == []


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true, which the lanes see to."""
    moment = threading.Event()
    return any(condition() or moment.wait(0.01) for _ in range(3000))
