"""Schedules of `torch.distributed.pipelining`: gradients over commlayer are those over torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commlayer_adapters import pipelining
from ranks.pool import Ranks
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

import commlayer

MICROBATCHES = 4
WIDTH = 16


def trained(rank: int, size: int, schedule: str, over_commlayer: bool) -> list[torch.Tensor]:
    """The gradients of this rank after two steps."""
    torch.manual_seed(0)
    each = 2 if schedule == "interleaved" else 1
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())
        for _ in range(size * each)
    ]
    world = dist.group.WORLD
    stages = [
        PipelineStage(layers[number], number, size * each, torch.device("cpu"), group=world)
        for number in range(rank, size * each, size)
    ]
    loss = torch.nn.MSELoss()
    run: Any = {
        "1f1b": lambda: Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss),
        "gpipe": lambda: ScheduleGPipe(stages[0], MICROBATCHES, loss_fn=loss),
        "interleaved": lambda: ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss),
    }[schedule]()
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    comm = commlayer.connect({"backend": "gloo"}, group=world) if over_commlayer else None
    with nullcontext() if comm is None else pipelining.carried_by(comm, world):
        for _ in range(2):
            first = (inputs,) if rank == 0 else ()
            last = {"target": targets} if rank == size - 1 else {}
            run.step(*first, **last)
    if comm is not None:
        comm.close()
    return [p.grad for layer in layers[rank::size] for p in layer.parameters()]


def both(schedule: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    plain = trained(rank, size, schedule, over_commlayer=False)
    ours = trained(rank, size, schedule, over_commlayer=True)
    assert plain
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_gradients_are_identical(ranks: Ranks, schedule: str) -> None:
    ranks.run(both, 2, schedule, timeout=100)


def replaced() -> None:
    from torch.distributed.pipelining import schedules

    dist.init_process_group("gloo")
    original = schedules._batch_p2p
    comm = commlayer.connect({"backend": "gloo"}, group=dist.group.WORLD)
    peer = 1 - comm.rank
    into = torch.zeros(3)
    with pipelining.carried_by(comm):
        assert schedules._batch_p2p is not original
        ops = [
            dist.P2POp(dist.isend, torch.full((3,), float(comm.rank)), peer),
            dist.P2POp(dist.irecv, into, peer),
        ]
        for work in schedules._batch_p2p(ops):
            assert not isinstance(work, dist.Work)
            work.wait()
    assert into.tolist() == [float(peer)] * 3
    assert schedules._batch_p2p is original
    comm.close()
    dist.destroy_process_group()


def test_the_block_ends_the_replacement(ranks: Ranks) -> None:
    ranks.run(replaced, 2)
