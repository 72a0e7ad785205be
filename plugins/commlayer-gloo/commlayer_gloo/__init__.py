"""The ``gloo`` backend: torch's Gloo process group, on host memory over TCP.

Facts were measured on torch 2.8.0, 2.11.0, 2.13.0, 2.14.1 and 2.15.0 with two and three processes
over loopback.  On any other version the weaker of what is known is declared: a poll
that may be early, as reported by others, and collectives without complex numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.descriptors import need_descriptors, out_of_descriptors
from commlayer.errors import CommError, ErrorKind
from commlayer.hooks import hookimpl
from commlayer.semantics import (
    Completion,
    DroppedWork,
    NativeTimeout,
    OperationSemantics,
    Order,
    PeerLoss,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    SizeMismatch,
    SourceLifetime,
    Threads,
    WaitBlocks,
)

_DESCRIPTORS = 8
"""What a device and its group open beside their connections: 4, as measured, and as many spare."""
_FOREVER = timedelta(days=3650)
_PROBED = ("2.8.", "2.11.", "2.13.", "2.14.", "2.15.")

SEMANTICS = Semantics(
    p2p=OperationSemantics(
        poll=Poll.NEVER_BEFORE_WAIT if torch.__version__.startswith(_PROBED) else Poll.MAY_BE_EARLY,
        wait_blocks=WaitBlocks.HOST,
        wait_repeatable=False,
        timeout=NativeTimeout.DESTRUCTIVE,
        dropped_work=DroppedWork.LOSES_MESSAGE,
        eager_bytes=0,
        post_may_block=PostMayBlock.NEVER,
        order=Order.PER_TAG,
        max_outstanding_per_pair=0,
        completion=Completion.MATCHED,
        size_mismatch=SizeMismatch.ABORTS,
        source_lifetime=SourceLifetime.REFERENCE,
        peer_loss=PeerLoss.NEXT_POST_ONLY,
    ),
    collective=OperationSemantics(
        poll=Poll.EXACT,
        wait_blocks=WaitBlocks.HOST,
        wait_repeatable=True,
        timeout=NativeTimeout.SAFE,
        dropped_work=DroppedWork.CONTINUES,
        post_may_block=PostMayBlock.NEVER,
        order=Order.IN_ORDER_STREAM,
        max_outstanding_per_pair=0,
        completion=Completion.MATCHED,
        source_lifetime=SourceLifetime.REFERENCE,
        peer_loss=PeerLoss.NEXT_POST_ONLY,
    ),
    progress=Progress.AUTONOMOUS,
    threads=Threads.MULTIPLE,
    tags=True,
    devices=("cpu",),
)

_MEASURED = "measured, torch 2.8.0 to 2.15.0, two processes over loopback"
SOURCES = {
    "p2p.poll": f"{_MEASURED}: false after delivery until somebody waits",
    "p2p.wait_repeatable": f"{_MEASURED}: a second wait closes every pair of the group",
    "p2p.timeout": f"{_MEASURED}: an expired wait closes every pair of the group",
    "p2p.dropped_work": f"{_MEASURED}: the message is lost and later sends to the peer hang",
    "p2p.eager_bytes": f"{_MEASURED}: a send of one byte returns only when it is received",
    "p2p.order": f"{_MEASURED}: first in, first out per peer and tag",
    "p2p.completion": f"{_MEASURED}: a send is complete only once the peer has posted",
    "p2p.size_mismatch": f"{_MEASURED}: too small a receive aborts the receiver's process",
    "p2p.source_lifetime": f"{_MEASURED}: bytes are read when the peer is ready, never copied",
    "p2p.peer_loss": f"{_MEASURED}: killed in mid-transfer, only the next post raises",
    "collective.poll": f"{_MEASURED}: truthful without a wait",
    "collective.timeout": f"{_MEASURED}: harmless, the wait can be retried",
    "collective.dropped_work": f"{_MEASURED}: safe",
    "collective.order": f"{_MEASURED}: broadcasts of one group in the order of their posts",
    "collective.completion": f"{_MEASURED}: complete only once the peer takes part",
    "collective.peer_loss": f"{_MEASURED}: killed in mid-transfer, only the next post raises",
}


class GlooEndpoint(Endpoint):
    """One Gloo process group, used without the dispatcher of ``torch.distributed``."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
        return self._group.send([tensor], dst, tag)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
        return self._group.recv([tensor], src, tag)

    def wait(self, work: Any) -> None:
        work.wait(_FOREVER)

    def close(self) -> None:
        self._group = None


class GlooTransport(Transport):
    """Makes groups by name on the world's store; only the world's ranks take part.

    The connect timeout governs their making; every wait has a limit of its own
    that never expires, because one that does closes all pairs of the group.
    """

    def __init__(self, world: World, device: Any) -> None:
        self._world = world
        self._device = device

    def endpoint(self, name: str) -> Endpoint:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._world.remaining())
        options._devices = [self._device]
        options._threads = 1
        store: Any = self._world.client()
        prefixed = PrefixStore(f"gloo/{name}", store)
        rank, size = self._world.rank, self._world.size
        try:
            group = self._world.call(lambda: ProcessGroupGloo(prefixed, rank, size, options))
        except CommError:
            raise
        except RuntimeError as error:
            raise out_of_descriptors(f"gloo group {name!r}", error) or CommError(
                ErrorKind.TIMEOUT,
                f"gloo group {name!r}",
                f"rank {self._world.rank} could not connect to all ranks (limit "
                f"{self._world.connect_timeout:g} s): {error}",
                "See that every rank runs and that the hosts reach each other; "
                "options = {interface = NAME} chooses the network interface",
            ) from error
        return GlooEndpoint(group)


class GlooBackend(Backend):
    """``gloo``.  Options: ``interface`` (network interface; else ``GLOO_SOCKET_IFNAME``)."""

    name: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS
    priority: ClassVar[int] = 10
    sources: ClassVar[Mapping[str, str]] = SOURCES

    def viability(self) -> Viability:
        if dist.is_available() and dist.is_gloo_available():
            return Viability(True, f"torch {torch.__version__} is built with Gloo")
        return Viability(
            False, f"torch {torch.__version__} is built without Gloo", "pip install torch"
        )

    def versions(self) -> Mapping[str, str]:
        return {"torch": str(torch.__version__)}

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        unknown = set(options) - {"interface"}
        if unknown:
            raise CommError(
                ErrorKind.CONFIG,
                "options of backend 'gloo'",
                f"unknown {', '.join(sorted(unknown))}",
                "Known: interface",
            )
        # Gloo's own thread ends the process when it cannot accept a connection.
        need_descriptors("backend 'gloo'", world.size + _DESCRIPTORS)
        interface = options.get("interface") or os.environ.get("GLOO_SOCKET_IFNAME", "")
        try:
            device = _device(str(interface).split(",")[0])
        except RuntimeError as error:
            raise out_of_descriptors("backend 'gloo'", error) or CommError(
                ErrorKind.CONFIG,
                "backend 'gloo'",
                f"no network device ({error})",
                "Set options = {interface = NAME} or GLOO_SOCKET_IFNAME to an interface that is up",
            ) from error
        return GlooTransport(world, device)


def _device(interface: str) -> Any:
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


@hookimpl
def commlayer_backend() -> Backend:
    return GlooBackend()
