"""What a plugin author implements.

A plugin is a module named by an entry point of the group ``commlayer.backends``.
Its hook implementation ``commlayer_backend()`` returns a `Backend`: a name, a
table of facts (`Semantics`), and `Backend.open`, which returns the live
`Transport` of this process.  A transport opens `Endpoint` objects, each one
native communicator on which point-to-point operations are posted.

The core hands an endpoint only one-dimensional, contiguous, non-empty ``uint8``
tensors on a declared device, valid ranks, and tags below ``2 ** 30``.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from commlayer.semantics import Semantics

if TYPE_CHECKING:
    from torch import Tensor

PLUGIN_API = 1
"""The version of the interface in this module, `commlayer.semantics` and `commlayer.hooks`."""


class Store(Protocol):
    """The part of a torch ``Store`` that connecting needs: keys to bytes, shared by all ranks."""

    def set(self, key: str, value: bytes) -> None:
        """Set `key`; seen by all ranks."""
        ...

    def get(self, key: str) -> bytes:
        """The value of `key`; waits until it is set."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are set; never waits."""
        ...


T = TypeVar("T")


def _directly(function: Callable[[], T]) -> T:
    return function()


@dataclass(frozen=True)
class World:
    """The ranks that connect together.

    `rank` and `size` are local to the connecting group.  `store` is shared by
    exactly these ranks; nobody has used its keys before this connection.
    `connect_timeout` is in seconds and bounds everything that connecting waits for;
    `remaining` is what is left of it.
    """

    rank: int
    size: int
    store: Store
    connect_timeout: float
    name: str = ""
    """What the ranks are ranks of: the job or the group, and the name of the connection."""
    deadline: float = math.inf
    """When `connect_timeout` is over, by ``time.monotonic()``."""
    _caller: Callable[[Callable[[], Any]], Any] = _directly
    """How `call` makes a call."""

    def remaining(self) -> float:
        """Seconds that connecting may still take; never 0, which some transports take for none."""
        return max(0.001, min(self.connect_timeout, self.deadline - time.monotonic()))

    def call(self, function: Callable[[], T]) -> T:
        """Make a native call that may block, such as making a communicator with all ranks.

        It runs on another thread, so that this one answers signals and hears what
        other ranks fail of.  Raises what `function` raises, `CommTimeout` when
        connecting has taken too long, and what made another rank give up.
        """
        return self._caller(function)  # type: ignore[no-any-return]

    def client(self) -> Store:
        """A client of the store for one user alone: torch's serialise what they are asked.

        A key that one communicator waits for on a shared client would hold up all
        others, whose keys may have to come first.  It waits for a key as long as
        connecting may take.
        """
        client: Any = own_client(self.store)
        if client is not self.store and hasattr(client, "set_timeout"):
            # A clone has the limit of the store, which may be that of one try to reach it: a
            # peer that makes other communicators first would seem to be lost.
            client.set_timeout(timedelta(seconds=self.connect_timeout))
        return client  # type: ignore[no-any-return]


def own_client(store: Any) -> Any:
    """Another client of the same store; `store` itself where its kind needs none."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store  # a store in Python's own memory, or one that has no clone()


@dataclass(frozen=True)
class Viability:
    """Whether a backend can run here.  `reason` says why (not); `install` says what to do."""

    ok: bool
    reason: str
    install: str = ""


class Endpoint(ABC):
    """One native communicator: posts operations and completes their works.

    Works are the transport's own objects and opaque to the core.  `isend` and
    `irecv` return one at once unless ``post_may_block`` is declared.  An
    operation that cannot be posted raises; `wait` raises what the transport
    raises when the operation failed.
    """

    @abstractmethod
    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        """Post a send of `tensor` to rank `dst`; returns the native work."""

    @abstractmethod
    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        """Post a receive from rank `src` into `tensor`; returns the native work.

        A message may be shorter than `tensor`: it fills the first bytes.
        """

    def wait(self, work: Any) -> None:
        """Block as ``wait_blocks`` declares until `work` is complete, however long it takes."""
        work.wait()

    def poll(self, work: Any) -> bool:
        """The transport's own completion query; called only where ``poll`` is EXACT."""
        return bool(work.is_completed())

    def close(self) -> None:  # noqa: B027
        """Release the communicator.  Called once, after its lanes have ended."""


class Transport(ABC):
    """The live object of one backend in one process."""

    @abstractmethod
    def endpoint(self, name: str) -> Endpoint:
        """Make the communicator `name` with all ranks of the world.

        Ranks pair by name.  Raises within the world's connect timeout when a
        rank is absent.
        """

    def close(self) -> None:  # noqa: B027
        """Release what the endpoints shared.  Called once, after every endpoint is closed."""


class Backend(ABC):
    """A named transport: facts now, a live object on demand.

    `plugin_api` is the closed range of `PLUGIN_API` versions the plugin was
    written for.  `priority` ranks viable backends for ``backend="auto"``: a
    device transport above a host transport.
    """

    name: ClassVar[str]
    plugin_api: ClassVar[tuple[int, int]]
    semantics: ClassVar[Semantics]
    priority: ClassVar[int] = 0
    sources: ClassVar[Mapping[str, str]] = {}
    """Where facts come from, by name (``p2p.poll``, ``progress``), for reports."""

    @abstractmethod
    def viability(self) -> Viability:
        """Whether the backend can run in this process.  Must not raise and must be cheap."""

    def job(self, connect_timeout: float) -> World | None:
        """The ranks that a launcher of the transport's own started; ``None`` if it has none.

        Asked by ``connect()`` without ``group`` where ``torch.distributed`` is not
        initialised; after ``None`` the environment that ``torchrun`` makes counts.
        The world's store is a torch ``Store``, the same at every call; the core
        prefixes its keys.
        """
        return None

    def launched(self) -> bool:
        """Whether the transport's own launcher started this process as one of several.

        As far as the environment says: asked of backends that were not chosen, so that
        a job without one is not taken for so many ranks that are alone.  Must be cheap.
        """
        return False

    def launcher(self, size: int) -> Sequence[str]:
        """The command that, put before a program's own, starts it on `size` ranks of a `job`.

        Empty where ranks may be started by anything that makes the environment of
        ``torchrun``.  Raises `CommError` saying what to install where it is missing.
        """
        return ()

    @abstractmethod
    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        """Open the transport.  `options` is the ``options`` table of the configuration."""

    def versions(self) -> Mapping[str, str]:
        """Versions of what the transport is made of, for reports."""
        return {}
