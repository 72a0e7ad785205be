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
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Backend, Viability, World
from commlayer.device.backend import StreamBackend, StreamTransport
from commlayer.device.device import DeviceRuntime, TorchDevice
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
from commlayer_oneccl.turns import TurnGroup

_BINDINGS = "oneccl_bindings_for_pytorch"
_EXTENSION = "intel_extension_for_pytorch"
_INSTALL = (
    "pip install an XPU build of torch (it contains xccl), or 'commlayer-oneccl[bindings]' "
    "from Intel's package index"
)


_FACTS = OperationSemantics(
    poll=Poll.EXACT,
    wait_blocks=WaitBlocks.STREAM,
    wait_repeatable=True,
    timeout=NativeTimeout.SAFE,
    order=Order.IN_ORDER_STREAM,
    max_outstanding_per_pair=0,
)

XCCL_SEMANTICS = Semantics(
    p2p=replace(
        _FACTS,
        dropped_work=DroppedWork.CONTINUES,
        post_may_block=PostMayBlock.ALWAYS,
        source_lifetime=SourceLifetime.RECORD_STREAM,
    ),
    collective=_FACTS,
    progress=Progress.AUTONOMOUS,
    threads=Threads.SERIALIZED,
    tags=False,
    devices=("xpu",),
)

BINDINGS_SEMANTICS = Semantics(
    progress=Progress.AUTONOMOUS, threads=Threads.SERIALIZED, devices=("xpu",)
)
"""Little is known: everything that was not measured is at its weakest."""

_READ = "read in torch's ProcessGroupXCCL, not run"
_THREADS = "autograd's threads post on the groups that the main thread made"
XCCL_SOURCES = {
    "p2p.poll": f"{_READ}: a query of the end event, which never reports errors",
    "p2p.wait_blocks": f"{_READ}: wait() orders the current stream",
    "p2p.wait_repeatable": f"{_READ}: every wait() orders the stream that is current then",
    "p2p.timeout": f"{_READ}: throws and leaves the operation running",
    "p2p.dropped_work": f"{_READ}: the operation is queued, and memory recorded on its stream",
    "p2p.post_may_block": "isend polls for the peer's receive; all ranks sending first livelocks "
    "(sglang 23645)",
    "p2p.order": f"{_READ}: one stream per communicator",
    "p2p.source_lifetime": f"{_READ}: record_stream, always",
    "collective.source_lifetime": f"{_READ}: stashed",
    "threads": f"{_THREADS} (DistributedDataParallel)",
    "progress": f"{_READ}: kernels on the device",
}
_MEASURED = "measured on a build of the bindings for the CPU, 2025-11"
_LOCK = "read in the bindings' dpcpp_ccl.cpp and utils.h, not run"
BINDINGS_SOURCES = {
    "p2p.poll": f"{_MEASURED}: it waits inside (536 ms with a late peer)",
    "p2p.post_may_block": f"{_LOCK}: one lock of the process from the post until completion, so "
    "operations of a process go one at a time, each when both its ranks have come to it",
    "p2p.order": "measured on oneCCL's own library for the CPU: sends of one size to one peer "
    "overtook each other",
    "p2p.max_outstanding_per_pair": "follows from their order",
    "threads": f"{_THREADS} (DistributedDataParallel)",
    "progress": "oneCCL's own worker threads",
}


class _OneCclBackend(StreamBackend):
    """``oneccl``, for ``xpu`` devices.  Host tensors and headers go over ``gloo``."""

    name: ClassVar[str] = "oneccl"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    priority: ClassVar[int] = 100

    def viability(self) -> Viability:
        if not _has_xccl() and not _has(_BINDINGS):
            return Viability(
                False,
                f"torch {torch.__version__} is built without xccl, and {_BINDINGS} is missing",
                _INSTALL,
            )
        if not torch.xpu.is_available():
            return Viability(False, "no XPU device is visible", "See xpu-smi discovery")
        return Viability(True, f"{torch.xpu.device_count()} XPU devices")

    def device(self) -> DeviceRuntime:
        return TorchDevice("xpu", torch.xpu.current_device())


class XcclBackend(_OneCclBackend):
    """Torch's own ``xccl`` group."""

    semantics: ClassVar[Semantics] = XCCL_SEMANTICS
    sources: ClassVar[Mapping[str, str]] = XCCL_SOURCES

    def versions(self) -> Mapping[str, str]:
        return {"torch": str(torch.__version__)}

    def open(self, world: World, options: Mapping[str, Any]) -> StreamTransport:
        refuse_blocking_wait(self.name, "TORCH_XCCL_BLOCKING_WAIT", "XCCL_BLOCKING_WAIT")
        return super().open(world, options)

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        group: Any = dist.ProcessGroupXCCL
        if not hasattr(group, "Options"):  # torch 2.8
            return group(PrefixStore(name, store), rank, 2)
        options = group.Options()
        options._timeout = timeout
        if hasattr(options, "group_name"):  # of newer releases: torch's logs name the lane by it
            options.group_name = name
            options.global_ranks_in_group = [int(r) for r in name.rpartition("/")[2].split("-")]
        return group(PrefixStore(name, store), rank, 2, options)


class BindingsBackend(_OneCclBackend):
    """The ``ccl`` group of ``oneccl_bindings_for_pytorch``."""

    semantics: ClassVar[Semantics] = BINDINGS_SEMANTICS
    sources: ClassVar[Mapping[str, str]] = BINDINGS_SOURCES

    def versions(self) -> Mapping[str, str]:
        versions = {"torch": str(torch.__version__)}
        if _has(_BINDINGS):
            versions[_BINDINGS] = _bindings_version()
        return versions

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        if _has(_EXTENSION):
            importlib.import_module(_EXTENSION)
        importlib.import_module(_BINDINGS)
        creator = dist.Backend._plugins["CCL"].creator_fn
        group = creator(PrefixStore(name, store), rank, 2, timeout)
        return TurnGroup(group, PrefixStore(f"{name}/turns", store), rank)


def _has_xccl() -> bool:
    return dist.is_available() and dist.is_xccl_available()


def _bindings_version() -> str:
    try:
        return version("oneccl-bind-pt")
    except PackageNotFoundError:
        return "unknown"


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@hookimpl
def commlayer_backend() -> Backend:
    return XcclBackend() if _has_xccl() else BindingsBackend()
