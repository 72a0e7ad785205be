"""A program: one of two ranks follows the traces on real gloo."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from traces import GLOO, follow


def main(folder: str, rank: int) -> None:
    """Write ``{trace: observations}`` to a file of `folder` named after the rank."""
    store = dist.FileStore(f"{folder}/store", 2)
    limit = timedelta(seconds=60)

    def group(name: str) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, limit)

    class Gloo:
        def __init__(self, name: str) -> None:
            self._group = group(name)

        def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Any:
            return self._group.send([tensor], dst, tag)

        def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Any:
            return self._group.recv([tensor], src, tag)

    barrier = group("sync")
    seen = {
        name: follow(
            trace[rank],
            rank,
            Gloo(name),
            lambda: barrier.barrier().wait(),
            lambda: time.sleep(0.001),
        )
        for name, trace in GLOO.items()
    }
    barrier.barrier().wait()
    Path(folder, str(rank)).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
