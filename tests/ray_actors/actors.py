"""A pipeline stage as a Ray actor: one actor, one process, one rank."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray
import torch

import commlayer

PATIENCE = 60.0


@ray.remote(num_cpus=1, max_restarts=0)
class Stage:
    """A rank of a pipeline.  The driver tells it which one, and where rank 0 is."""

    def store_address(self) -> tuple[str, int]:
        """This node, and a port of it that is free: where rank 0 opens the store."""
        address = ray.util.get_node_ip_address()
        with socket.create_server((address, 0)) as probe:
            return address, probe.getsockname()[1]

    def connect(self, rank: int, size: int, store: tuple[str, int]) -> tuple[str, int]:
        """Connect with the other actors, which do so at the same time; this node and process."""
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR=store[0], MASTER_PORT=str(store[1])
        )
        node = ray.util.get_node_ip_address()
        self.comm = commlayer.connect({"backend": "gloo", "bind_address": node})
        self.peer = 1 - rank
        return node, os.getpid()

    def exchange(self, steps: int) -> list[dict[str, Any]]:
        """Send the peer a tensor dict for each step, and receive as many; what has come."""
        handles = [self.comm.irecv_tensor_dict(self.peer) for _ in range(steps)]
        for step in range(steps):
            self.comm.isend_tensor_dict(payload(self.comm.rank, step), self.peer)
        return [handle.result(PATIENCE) for handle in handles]

    def broadcast(self, src: int) -> torch.Tensor:
        """The tokens that `src` has sampled."""
        sampled = tokens(src) if self.comm.rank == src else None
        return self.comm.broadcast(sampled, src)

    def await_nothing(self) -> None:
        """Post a receive of something that the peer never sends."""
        self.pending = self.comm.irecv(None, self.peer)

    def receive(self) -> torch.Tensor:
        """What was awaited; raises why it does not come."""
        return self.pending.result()

    def send(self) -> None:
        """Send the peer something new."""
        self.comm.send(torch.ones(3), self.peer)

    def leave(self) -> None:
        """End this actor in order, its communicator still open."""
        ray.actor.exit_actor()

    def close(self) -> None:
        self.comm.close()


def payload(rank: int, step: int) -> dict[str, Any]:
    """What `rank` sends in `step`: one tensor that fits into a header and one that does not."""
    start = 1000 * rank + step
    return {
        "step": step,
        "positions": torch.arange(start, start + 4 + step),
        "hidden": torch.full((256 + step, 1024), float(start), dtype=torch.bfloat16),
        "of": {"rank": rank, "names": ["positions", "hidden"]},
    }


def tokens(src: int) -> torch.Tensor:
    return torch.arange(7) + 100 * src
