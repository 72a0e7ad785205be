"""The ``nccl`` backend: NCCL on CUDA, RCCL on ROCm.

Facts were read in the source of torch's ``ProcessGroupNCCL``; no send between
two devices has been run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Backend, Viability
from commlayer.hookspecs import hookimpl
from commlayer.semantics import (
    DroppedWork,
    NativeTimeout,
    OperationSemantics,
    Order,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    SourceLifetime,
    Threads,
    WaitBlocks,
)
from commlayer.streams.backend import StreamBackend
from commlayer.streams.device import DeviceRuntime, TorchDevice

_P2P = OperationSemantics(
    poll=Poll.EXACT,
    wait_blocks=WaitBlocks.STREAM,
    wait_repeatable=True,
    timeout=NativeTimeout.DESTRUCTIVE,
    dropped_work=DroppedWork.CONTINUES,
    post_may_block=PostMayBlock.FIRST_USE,
    order=Order.IN_ORDER_STREAM,
    max_outstanding_per_pair=0,
    source_lifetime=SourceLifetime.RECORD_STREAM,
    dtypes=None,
)

SEMANTICS = Semantics(
    p2p=_P2P,
    collective=OperationSemantics(
        poll=Poll.EXACT,
        wait_blocks=WaitBlocks.STREAM,
        wait_repeatable=True,
        timeout=NativeTimeout.DESTRUCTIVE,
        dropped_work=DroppedWork.CONTINUES,
        order=Order.IN_ORDER_STREAM,
        source_lifetime=SourceLifetime.REFERENCE,
        dtypes=None,
    ),
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("cuda",),
)

_SOURCE = "read in torch's ProcessGroupNCCL"
SOURCES = {
    "p2p.poll": f"{_SOURCE}: a query of the end event",
    "p2p.wait_blocks": f"{_SOURCE}: wait() orders the current stream",
    "p2p.timeout": f"{_SOURCE}: wait(timeout) polls from the work's creation and aborts the "
    "communicator when it expires",
    "p2p.post_may_block": "the first operation of a pair makes its communicator "
    "(pytorch issue 108378)",
    "p2p.order": f"{_SOURCE}: one stream per communicator",
    "p2p.source_lifetime": f"{_SOURCE}: record_stream, always",
    "collective.source_lifetime": f"{_SOURCE}: stashed until wait or watchdog",
}


class NcclBackend(StreamBackend):
    """``nccl``, for ``cuda`` devices (ROCm's too).  Host tensors and headers go over ``gloo``."""

    name: ClassVar[str] = "nccl"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS
    sources: ClassVar[Mapping[str, str]] = SOURCES
    priority: ClassVar[int] = 100

    def viability(self) -> Viability:
        install = "pip install a CUDA or ROCm build of torch"
        if not dist.is_available() or not dist.is_nccl_available():
            return Viability(False, f"torch {torch.__version__} is built without NCCL", install)
        if not torch.cuda.is_available():
            return Viability(
                False, "no CUDA or ROCm device is visible", "See nvidia-smi or rocm-smi"
            )
        return Viability(True, f"{torch.cuda.get_device_name()}, NCCL {_nccl_version()}")

    def versions(self) -> Mapping[str, str]:
        versions = {"torch": str(torch.__version__)}
        if dist.is_available() and dist.is_nccl_available():
            versions["nccl"] = _nccl_version()
        return versions

    def device(self) -> DeviceRuntime:
        return TorchDevice("cuda", torch.cuda.current_device())

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, 2, options)


def _nccl_version() -> str:
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


@hookimpl
def commlayer_backend() -> Backend:
    return NcclBackend()
