"""The ``npu`` backend: HCCL on Ascend devices, through ``torch_npu``.

Facts were read in the source of ``torch_npu``'s ``ProcessGroupHCCL`` and in
public threads of vllm-ascend; nothing has been run on a device.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
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

_INSTALL = "pip install 'commlayer-npu[device]' on a machine with the CANN toolkit"

SEMANTICS = Semantics(
    p2p=OperationSemantics(
        poll=Poll.EXACT,
        wait_blocks=WaitBlocks.STREAM,
        wait_repeatable=True,
        timeout=NativeTimeout.IGNORED,
        dropped_work=DroppedWork.CONTINUES,
        post_may_block=PostMayBlock.NEVER,
        order=Order.IN_ORDER_STREAM,
        max_outstanding_per_pair=0,
        source_lifetime=SourceLifetime.EVENT,
        dtypes=None,
    ),
    collective=OperationSemantics(
        poll=Poll.EXACT,
        wait_blocks=WaitBlocks.STREAM,
        wait_repeatable=True,
        timeout=NativeTimeout.IGNORED,
        order=Order.IN_ORDER_STREAM,
        source_lifetime=SourceLifetime.EVENT,
        dtypes=None,
    ),
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("npu",),
)

_SOURCE = "read in torch_npu's ProcessGroupHCCL"
SOURCES = {
    "p2p.poll": f"{_SOURCE}: the end events are queried",
    "p2p.timeout": f"{_SOURCE}: ignored unless TORCH_HCCL_BLOCKING_WAIT=1",
    "p2p.order": f"{_SOURCE}: one serialized stream per communicator; a send holds it until it is "
    "matched (vllm-ascend 11976)",
    "p2p.source_lifetime": f"{_SOURCE}: recordStream, taken back by wait",
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

    def device(self) -> DeviceRuntime:
        return TorchDevice("npu", _torch_npu().npu.current_device())

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        groups = importlib.import_module("torch_npu._C._distributed_c10d")
        options = groups.ProcessGroupHCCL.Options()
        options._timeout = timeout
        return groups.ProcessGroupHCCL(PrefixStore(name, store), rank, 2, options)


def _torch_npu() -> Any:
    return importlib.import_module("torch_npu")


@hookimpl
def commlayer_backend() -> Backend:
    return NpuBackend()
