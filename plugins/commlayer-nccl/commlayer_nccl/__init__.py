"""The ``nccl`` backend: NCCL on CUDA, RCCL on ROCm.

Facts were read in the source of torch's ``ProcessGroupNCCL``, which runs unchanged in
``make test-cuda``, on a stand-in for CUDA and NCCL; no send between two devices has been run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Backend, Viability, World
from commlayer.device.backend import StreamBackend, StreamTransport
from commlayer.device.device import DeviceRuntime
from commlayer.device.environment import refuse_blocking_wait
from commlayer.hooks import hookimpl
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
from commlayer_nccl.device import CudaDevice

_FACTS = OperationSemantics(
    poll=Poll.EXACT,
    wait_blocks=WaitBlocks.STREAM,
    wait_repeatable=True,
    timeout=NativeTimeout.DESTRUCTIVE,
    dropped_work=DroppedWork.CONTINUES,
    order=Order.IN_ORDER_STREAM,
    max_outstanding_per_pair=0,
)

SEMANTICS = Semantics(
    p2p=replace(
        _FACTS,
        post_may_block=PostMayBlock.FIRST_USE,
        source_lifetime=SourceLifetime.RECORD_STREAM,
    ),
    collective=_FACTS,
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("cuda",),
)

_READ = "read in torch's ProcessGroupNCCL"
SOURCES = {
    "p2p.poll": f"{_READ}: a query of the end event, or an error; complete or failed",
    "p2p.wait_blocks": f"{_READ}: wait() orders the current stream",
    "p2p.wait_repeatable": f"{_READ}: every wait() orders the stream that is current then",
    "p2p.timeout": f"{_READ}: wait(timeout) polls from the work's creation and aborts the "
    "communicator when it expires",
    "p2p.dropped_work": f"{_READ}: the kernel is queued, and memory recorded on its stream",
    "p2p.post_may_block": "the first operation of a pair makes its communicator "
    "(pytorch issue 108378)",
    "p2p.order": f"{_READ}: one stream per communicator",
    "p2p.source_lifetime": f"{_READ}: record_stream, always",
    "collective.poll": f"{_READ}: a query of the end event",
    "collective.dropped_work": f"{_READ}: stashed until the watchdog sees the end event",
    "collective.source_lifetime": f"{_READ}: stashed until wait or watchdog",
    "threads": "autograd's threads post on the groups that the main thread made "
    "(DistributedDataParallel)",
    "progress": f"{_READ}: kernels on the device",
}


_MOST_CTAS = 4
"""Thread blocks of a communicator, each of which occupies a multiprocessor while it waits.  Not
measured: NCCL's own choice for two ranks is up to eight times as many."""


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

    def open(self, world: World, options: Mapping[str, Any]) -> StreamTransport:
        refuse_blocking_wait(self.name, "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
        return super().open(world, options)

    def device(self) -> DeviceRuntime:
        return CudaDevice("cuda", torch.cuda.current_device())

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        # The application's own streams come from the pool of the other priority.
        options.is_high_priority_stream = True
        # A communicator carries one message at a time between two devices: the least of them
        # leaves the device to the application while a message waits for its peer.
        options.config.min_ctas = 1
        options.config.max_ctas = _MOST_CTAS
        options.config.cga_cluster_size = 0
        # What torch's logs and its flight recorder call the lane.
        options.group_name = name
        options.global_ranks_in_group = [int(r) for r in name.rpartition("/")[2].split("-")]
        return dist.ProcessGroupNCCL(PrefixStore(name, store), rank, 2, options)


def _nccl_version() -> str:
    version: Any = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


@hookimpl
def commlayer_backend() -> Backend:
    return NcclBackend()
