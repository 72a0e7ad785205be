"""The ``oneccl`` backend: Intel XPU devices.

Uses torch's own ``xccl`` group where the build of torch has it, and otherwise
the ``ccl`` backend that ``oneccl_bindings_for_pytorch`` registers.  Facts were
read in the source of ``ProcessGroupXCCL`` and measured on a build of the
bindings for the CPU; nothing has been run on a device.
"""

from __future__ import annotations

import importlib
import importlib.util
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

_BINDINGS = "oneccl_bindings_for_pytorch"
_INSTALL = (
    "pip install an XPU build of torch (it contains xccl), or 'commlayer-oneccl[bindings]' "
    "from Intel's package index"
)


def _has_xccl() -> bool:
    check = getattr(dist, "is_xccl_available", None)
    return dist.is_available() and check is not None and bool(check())


SEMANTICS = Semantics(
    p2p=OperationSemantics(
        poll=Poll.EXACT if _has_xccl() else Poll.BLOCKS,
        wait_blocks=WaitBlocks.STREAM,
        wait_repeatable=True,
        timeout=NativeTimeout.SAFE if _has_xccl() else NativeTimeout.DESTRUCTIVE,
        dropped_work=DroppedWork.CONTINUES,
        post_may_block=PostMayBlock.ALWAYS,
        order=Order.IN_ORDER_STREAM,
        max_outstanding_per_pair=0,
        source_lifetime=SourceLifetime.RECORD_STREAM,
        dtypes=None,
    ),
    collective=OperationSemantics(
        poll=Poll.EXACT if _has_xccl() else Poll.BLOCKS,
        wait_blocks=WaitBlocks.STREAM,
        wait_repeatable=True,
        order=Order.IN_ORDER_STREAM,
        source_lifetime=SourceLifetime.REFERENCE,
        dtypes=None,
    ),
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("xpu",),
)

_SOURCE = "read in torch's ProcessGroupXCCL"
SOURCES = {
    "p2p.poll": f"{_SOURCE}: a query of the end event; the bindings' poll waits inside "
    "(measured on their CPU build: 536 ms with a late peer)",
    "p2p.timeout": f"{_SOURCE}: throws and leaves the operation running",
    "p2p.post_may_block": "isend polls for the peer's receive; all ranks sending first livelocks "
    "(sglang 23645)",
    "p2p.order": f"{_SOURCE}: one stream per communicator",
    "p2p.source_lifetime": f"{_SOURCE}: record_stream, always",
    "collective.source_lifetime": f"{_SOURCE}: stashed until wait",
}


class OneCclBackend(StreamBackend):
    """``oneccl``, for ``xpu`` devices.  Host tensors and headers go over ``gloo``."""

    name: ClassVar[str] = "oneccl"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    semantics: ClassVar[Semantics] = SEMANTICS
    sources: ClassVar[Mapping[str, str]] = SOURCES
    priority: ClassVar[int] = 100

    def viability(self) -> Viability:
        if not _has_xccl() and importlib.util.find_spec(_BINDINGS) is None:
            return Viability(
                False,
                f"torch {torch.__version__} is built without xccl, and {_BINDINGS} is missing",
                _INSTALL,
            )
        if not _xpu().is_available():
            return Viability(False, "no XPU device is visible", "See xpu-smi discovery")
        return Viability(True, f"{_xpu().device_count()} XPU devices")

    def versions(self) -> Mapping[str, str]:
        versions = {"torch": str(torch.__version__)}
        if importlib.util.find_spec(_BINDINGS) is not None:
            versions[_BINDINGS] = str(getattr(_bindings(), "__version__", "unknown"))
        return versions

    def device(self) -> DeviceRuntime:
        return TorchDevice("xpu", _xpu().current_device())

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        if _has_xccl():
            return importlib.import_module("torch._C._distributed_c10d").ProcessGroupXCCL(
                PrefixStore(name, store), rank, 2
            )
        _bindings()
        creator = dist.Backend._plugins["CCL"].creator_fn
        return creator(PrefixStore(name, store), rank, 2, timeout)


def _bindings() -> Any:
    if importlib.util.find_spec("intel_extension_for_pytorch") is not None:
        importlib.import_module("intel_extension_for_pytorch")
    return importlib.import_module(_BINDINGS)


def _xpu() -> Any:
    return torch.xpu


@hookimpl
def commlayer_backend() -> Backend:
    return OneCclBackend()
