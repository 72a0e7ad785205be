"""The backend ``oneccl_cpu``: oneCCL's own library as a device transport, on host memory.

For tests only.  Host memory plays the device, so every payload goes over oneCCL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from torch._C._distributed_c10d import PrefixStore

from commlayer.backend import Viability
from commlayer.device.backend import StreamBackend
from commlayer.device.device import DeviceRuntime
from commlayer.semantics import (
    OperationSemantics,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    Threads,
)
from oneccl_library import library
from oneccl_library.host_runtime import HostRuntime
from oneccl_library.library import Group
from oneccl_library.prepare import VERSION

_HERE = "measured in test_oneccl_library.py"


class OneCclCpuBackend(StreamBackend):
    """Headers go over ``gloo``; two ranks meet on a communicator for each lane."""

    name: ClassVar[str] = "oneccl_cpu"
    host: ClassVar[str] = "gloo"
    plugin_api: ClassVar[tuple[int, int]] = (1, 1)
    priority: ClassVar[int] = -100
    semantics: ClassVar[Semantics] = Semantics(
        p2p=OperationSemantics(
            poll=Poll.EXACT,
            wait_repeatable=True,
            post_may_block=PostMayBlock.FIRST_USE,
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.SERIALIZED,
    )
    sources: ClassVar[Mapping[str, str]] = {
        "p2p.poll": _HERE,
        "p2p.wait_repeatable": _HERE,
        "p2p.post_may_block": f"{_HERE}: making a communicator waits for the peer, a send does not",
        "threads": f"{_HERE}: waits and posts of several threads, one a communicator",
        "progress": "oneCCL's own worker threads",
    }

    def viability(self) -> Viability:
        if library.FOLDER not in os.environ:
            return Viability(False, "oneCCL's own library is not here", "make test-oneccl")
        return Viability(True, "oneCCL's own library, host memory")

    def versions(self) -> Mapping[str, str]:
        return {"oneCCL's own library, host memory": VERSION}

    def device(self) -> DeviceRuntime:
        return HostRuntime()

    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Group:
        return Group(PrefixStore(name, store), rank).connect()
