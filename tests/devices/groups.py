"""torch's own groups, and waiting, as tests on two devices need them."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import here
from torch import Tensor

QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
"""The watchdog notices errors and leaves it to the caller to act.  By default it writes down
what it knows, waits a minute, and ends the process."""


def group(name: str = "bare") -> Any:
    """A ProcessGroupNCCL of all ranks of the run."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    store = dist.PrefixStore(name, here.store())
    return dist.ProcessGroupNCCL(store, here.rank(), here.world_size(), options)


def swap(pg: Any, peer: int, out: Tensor, into: Tensor) -> None:
    """One message each way.  The first makes the communicator, for which both ranks are needed."""
    if here.rank() < peer:
        pg.send([out], peer, 0).wait()
        pg.recv([into], peer, 0).wait()
    else:
        pg.recv([into], peer, 0).wait()
        pg.send([out], peer, 0).wait()
    torch.cuda.synchronize()


def until(condition: Callable[[], bool], limit: float = 30) -> bool:
    """Whether `condition` comes true within a time that only a hang exceeds."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
