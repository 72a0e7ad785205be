"""A compiled graph of two actors whose tensors go through commlayer; ``make test-ray`` runs it."""

from __future__ import annotations

import socket
import sys

import torch

try:
    import ray
except ImportError as error:
    sys.exit(f"Not run: Ray cannot be imported here ({error}); make test-ray installs it")
from ray.dag import InputNode

from commlayer_adapters.ray_graphs import CommlayerCommunicator

STEPS = 5
OBJECT_STORE_BYTES = 80 << 20


@ray.remote(num_cpus=1)
class Stage:
    """One stage; adds its number."""

    def __init__(self, number: int) -> None:
        self._number = number

    def first(self, step: int) -> torch.Tensor:
        return torch.full((2 + step, 300), float(step + self._number))

    def second(self, hidden: torch.Tensor) -> tuple[tuple[int, ...], float]:
        return tuple(hidden.shape), float((hidden + self._number).sum())


def main() -> int:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES)
    try:
        stages = [Stage.remote(1), Stage.remote(2)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = "127.0.0.1", probe.getsockname()[1]
        comm = CommlayerCommunicator(stages, address, backend="gloo", name="graph")
        with InputNode() as step:
            hidden = stages[0].first.bind(step).with_tensor_transport(transport=comm)
            graph = stages[1].second.bind(hidden).experimental_compile()
        for number in range(STEPS):
            shape, total = ray.get(graph.execute(number), timeout=60)
            expected = (2 + number) * 300 * (number + 3.0)
            if shape != (2 + number, 300) or total != expected:
                print(f"step {number}: got {shape}, {total}; expected {expected}", file=sys.stderr)
                return 1
        print(f"compiled graph over commlayer: {STEPS} steps of changing shape, all right")
        graph.teardown()
        return 0
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
