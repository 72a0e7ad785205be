"""The ``npu`` backend: HCCL on Ascend devices, through ``torch_npu``.

Facts were read in the source of ``torch_npu``'s ``ProcessGroupHCCL`` and in
public threads of vllm-ascend; nothing has been run on a device.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Backend, Viability, World
from commlayer.device.backend import StreamBackend, StreamTransport
from commlayer.device.device import DeviceRuntime, TorchDevice
from commlayer.device.environment import refuse_blocking_wait
from commlayer.hooks import hookimpl
from commlayer.semantics import (
    Completion,
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

_INSTALL = "pip install 'commlayer-npu[device]' on a machine with the CANN toolkit"

_FACTS = OperationSemantics(
    poll=Poll.EXACT,
    wait_blocks=WaitBlocks.STREAM,
    wait_repeatable=True,
    timeout=NativeTimeout.IGNORED,
    order=Order.IN_ORDER_STREAM,
    max_outstanding_per_pair=0,
)

SEMANTICS = Semantics(
    p2p=replace(
        _FACTS,
        dropped_work=DroppedWork.CONTINUES,
        post_may_block=PostMayBlock.FIRST_USE,
        completion=Completion.MATCHED,
        source_lifetime=SourceLifetime.EVENT,
    ),
    collective=_FACTS,
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("npu",),
)


def _ends_unmatched() -> str:
    """What HCCL does with an operation whose peer never comes, by its own variable."""
    seconds = os.environ.get("HCCL_EXEC_TIMEOUT", "1836")
    if seconds == "0":
        return "HCCL_EXEC_TIMEOUT=0 lets it stay so for ever"
    return f"HCCL ends the process after HCCL_EXEC_TIMEOUT, here {seconds} s"


_READ = "read in torch_npu's ProcessGroupHCCL, not run"
SOURCES = {
    "p2p.poll": f"{_READ}: the end events are queried",
    "p2p.wait_blocks": f"{_READ}: wait() orders the current stream",
    "p2p.wait_repeatable": f"{_READ}: every wait() orders the stream that is current then",
    "p2p.timeout": f"{_READ}: ignored unless TORCH_HCCL_BLOCKING_WAIT=1, which is refused",
    "p2p.dropped_work": f"{_READ}: the send is queued, and its memory recorded until wait()",
    "p2p.post_may_block": f"{_READ}: the first operation of a pair reads the store and makes "
    "the communicator, on the posting thread; later ones hold the stream, not the host",
    "p2p.order": f"{_READ}: one serialized stream per communicator",
    "p2p.completion": "a send holds its stream until it is matched (vllm-ascend 11976), and "
    f"{_ends_unmatched()}",
    "p2p.source_lifetime": f"{_READ}: recordStream, taken back by wait",
    "collective.source_lifetime": f"{_READ}: depends on the mode",
    "threads": "autograd's threads post on the groups that the main thread made "
    "(DistributedDataParallel)",
    "progress": f"{_READ}: tasks on the device",
}


class NpuBackend(StreamBackend):
    """``npu``, for Ascend devices.  Host tensors and headers go over ``gloo``.

    A communicator per lane and direction keeps a send that is not matched yet
    from holding up anything else, fold traffic of a virtual pipeline included.
    """

    name: ClassVar[str] = "npu"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS
    sources: ClassVar[Mapping[str, str]] = SOURCES
    priority: ClassVar[int] = 100

    def viability(self) -> Viability:
        if importlib.util.find_spec("torch_npu") is None:
            return Viability(False, "torch_npu is not installed", _INSTALL)
        try:
            npu = _torch_npu().npu
        except Exception as error:
            return Viability(False, f"torch_npu cannot be imported ({error})", _INSTALL)
        if not npu.is_available():
            return Viability(False, "no Ascend device is visible", "See npu-smi info")
        return Viability(True, f"{npu.device_count()} Ascend devices")

    def versions(self) -> Mapping[str, str]:
        versions = {"torch": str(torch.__version__)}
        if self.viability().ok:
            versions["torch_npu"] = str(_torch_npu().__version__)
        return versions

    def open(self, world: World, options: Mapping[str, Any]) -> StreamTransport:
        refuse_blocking_wait(self.name, "TORCH_HCCL_BLOCKING_WAIT", "HCCL_BLOCKING_WAIT")
        return super().open(world, options)

    def device(self) -> DeviceRuntime:
        return TorchDevice("npu", _torch_npu().npu.current_device())

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        groups = importlib.import_module("torch_npu._C._distributed_c10d")
        options = groups.ProcessGroupHCCL.Options()
        options._timeout = timeout
        # Without ranks torch_npu takes a group for the global one, from which it derives the
        # application's groups, and forgets that when the group goes (ProcessGroupHCCL.cpp).
        options.global_ranks_in_group = [int(r) for r in name.rpartition("/")[2].split("-")]
        # In its logs and status files all groups without an id are one.
        options.group_id = name
        return groups.ProcessGroupHCCL(PrefixStore(name, store), rank, 2, options)


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")


@hookimpl
def commlayer_backend() -> Backend:
    return NpuBackend()
