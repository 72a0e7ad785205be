"""What observing costs: ``python tests/observe/overhead.py [ROUNDS [TRIPS]]`` from the root.

Two ranks over gloo, one connection per variant in the same two processes.  In every round
each variant, in turning order, sends a small dict there and back `TRIPS` times; printed
are medians over the rounds, of the time and of the processor time of rank 0, and their
ratio to nothing observed.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

import torch  # noqa: E402
from ranks import here  # noqa: E402
from ranks.pool import Ranks  # noqa: E402

VARIANTS = {
    "nothing": {"stall_timeout": 0.0},
    "stall_timeout = 60": {},
    "recorder_size = 4096": {"recorder_size": 4096},
    "metrics": {"metrics": True},
    "recorder and metrics": {"recorder_size": 4096, "metrics": True},
}


def measure(rounds: int, trips: int) -> dict[str, list[tuple[float, float]]]:
    """Microseconds of time and processor time a round trip, of every round but the first."""
    comms = {name: here.connect(name=name, **keys) for name, keys in VARIANTS.items()}
    tensors = {"hidden": torch.ones(64), "step": torch.zeros(1)}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    names = list(VARIANTS)
    for number in range(rounds + 1):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            comm = comms[name]
            here.meet(f"{number} {name}")
            began, used = time.perf_counter(), time.process_time()
            for _ in range(trips):
                if comm.rank == 0:
                    comm.isend_tensor_dict(tensors, 1)
                    comm.recv_tensor_dict(1)
                else:
                    comm.recv_tensor_dict(0)
                    comm.isend_tensor_dict(tensors, 0)
            if number:
                passed, used = time.perf_counter() - began, time.process_time() - used
                taken[name].append((1e6 * passed / trips, 1e6 * used / trips))
    for comm in comms.values():
        comm.close()
    return taken


def main(rounds: int = 25, trips: int = 200) -> None:
    ranks = Ranks()
    try:
        taken = ranks.run(measure, 2, rounds, trips, timeout=600)[0]
    finally:
        ranks.close()
    base = [statistics.median(column) for column in zip(*taken["nothing"], strict=True)]
    for name, values in taken.items():
        medians = [statistics.median(column) for column in zip(*values, strict=True)]
        figures = (f"{m:8.1f} us {m / b:.3f}x" for m, b in zip(medians, base, strict=True))
        print(f"{name:22} {', processor '.join(figures)}")


if __name__ == "__main__":
    import overhead  # the ranks import this module by its name

    overhead.main(*map(int, sys.argv[1:]))
