"""The demo's pipeline as ``torchrun`` starts it; compares with a single process.

    torchrun --nnodes 2 --node-rank R --master-addr A --master-port P tests/hosts/pipeline.py

The model is the demo's toy, so nothing but the library is needed.
"""

from __future__ import annotations

import os

import torch
from commlayer_demo.launch import run_alone
from commlayer_demo.pipeline import Pipeline
from commlayer_demo.schedule import Limits
from commlayer_demo.weights import load_stages, toy
from commlayer_demo.worker import Job

import commlayer
from commlayer.config import CommConfig
from commlayer.pipeline.topology import LinearTopology


def main() -> None:
    torch.set_num_threads(1)
    topology = LinearTopology(int(os.environ["WORLD_SIZE"]))
    job = Job(
        source=toy(),
        prompts=tuple(tuple(range(start, start + 9)) for start in range(1, 9)),
        limits=Limits(max_tokens=24, micro_batch=2, in_flight=4, prefill_chunk=8),
        topology=topology,
        rounds=0,
        config=CommConfig.load({"backend": "gloo"}),
    )
    stages = load_stages(job.source, job.layers(int(os.environ["RANK"])))
    with commlayer.connect(job.connection) as comm:
        scheduler = job.scheduler()
        stats = Pipeline(comm, topology, stages, scheduler).run()
        alone, _ = run_alone(job, lambda phase, done, total: None)
        same = scheduler.generated() == alone
        print(f"rank {comm.rank}: {stats.tokens} tokens, identical: {same}", flush=True)
        assert same


if __name__ == "__main__":
    main()
