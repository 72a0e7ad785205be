"""Two Ray actors send through the communicator of a compiled graph; ``make test-ray`` runs it.

Ray takes a communicator of one's own only between accelerators (its channel asserts a device
that is no CPU), so here its channel is played: the communicator is pickled to the actors, they
initialize it, and call what the channel calls.
"""

from __future__ import annotations

import socket
import sys
from typing import Any

import torch

try:
    import ray
except ImportError as error:
    sys.exit(f"Not run: Ray cannot be imported here ({error}); make test-ray installs it")

from commlayer_adapters.ray_graphs import CommlayerCommunicator

STEPS = 5
OBJECT_STORE_BYTES = 80 << 20


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@ray.remote(num_cpus=1)
class Stage:
    """One stage of a pipeline; adds 1."""

    def join(self, comm: CommlayerCommunicator, rank: int) -> int:
        self.comm = comm
        comm.initialize(rank)
        return comm.get_self_rank()

    def first(self) -> None:
        for step in range(STEPS):
            self.comm.send(torch.full((2 + step, 300), float(step + 1)), 1)

    def second(self) -> list[Any]:
        received = [
            self.comm.recv((2 + step, 300), torch.float32, 0, allocate if step % 2 else None)
            for step in range(STEPS)
        ]
        return [(tuple(tensor.shape), float((tensor + 1).sum())) for tensor in received]

    def leave(self) -> None:
        self.comm.destroy()


def main() -> int:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    try:
        stages = [Stage.remote() for _ in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = "127.0.0.1", probe.getsockname()[1]
        comm = CommlayerCommunicator(stages, address, backend="gloo", name="graph")
        ranks = ray.get([s.join.remote(comm, r) for r, s in enumerate(stages)], timeout=60)
        sent, received = stages[0].first.remote(), stages[1].second.remote()
        got = ray.get([sent, received], timeout=60)[1]
        expected = [((2 + step, 300), (2 + step) * 300 * (step + 2.0)) for step in range(STEPS)]
        ray.get([stage.leave.remote() for stage in stages], timeout=60)
        if ranks != [0, 1] or got != expected:
            print(f"ranks {ranks}, got {got}, expected {expected}", file=sys.stderr)
            return 1
        print(f"communicator of a Ray graph over commlayer: {STEPS} steps, all right")
        return 0
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
