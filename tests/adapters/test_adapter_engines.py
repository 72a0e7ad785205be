"""Megatron, SGLang and TensorRT-LLM in miniature: their calls, through the adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from commlayer_adapters.megatron import Communicate
from commlayer_adapters.sglang import PipelineGroup
from commlayer_adapters.tensorrt_llm import PointToPoint
from ranks.pool import Ranks

import commlayer

LIMIT = 100.0


def connected() -> commlayer.Communicator:
    return commlayer.connect({"backend": "gloo"})


# Megatron


def ring_of_two(variable: bool, wait: bool) -> None:
    """Forward and backward at once: with two ranks both come from the same one."""
    with connected() as comm:
        rank, peer = comm.rank, 1 - comm.rank
        communicate = Communicate(comm, torch.float32, torch.device("cpu"), variable)
        shape = (4 + rank, 2) if variable else (4, 2)
        previous, following, handles = communicate(
            tensor_send_next=torch.full(shape, float(rank), requires_grad=True),
            tensor_send_prev=torch.full(shape, rank + 10.0),
            recv_prev=True,
            recv_next=True,
            tensor_shape=None if variable else (4, 2),
            wait_on_reqs=wait,
        )
        for handle in (handles or {}).values():
            handle.wait(LIMIT)
        assert previous is not None
        assert following is not None
        assert previous.requires_grad
        assert previous.shape == ((4 + peer, 2) if variable else (4, 2))
        assert (previous == peer).all()
        assert (following == peer + 10).all()
        assert (handles is None) == wait


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("wait", [False, True])
def test_megatron_exchanges_both_ways(ranks: Ranks, variable: bool, wait: bool) -> None:
    ranks.run(ring_of_two, 2, variable, wait, timeout=LIMIT)


def one_way() -> None:
    """What the schedule of a first and a last stage asks for."""
    with connected() as comm:
        communicate = Communicate(comm, torch.float32, torch.device("cpu"))
        first = comm.rank == 0
        previous, following, handles = communicate(
            tensor_send_next=torch.ones(3) if first else None,
            tensor_send_prev=None,
            recv_prev=not first,
            recv_next=False,
            tensor_shape=(3,),
        )
        assert following is None
        assert handles is None
        assert (previous is None) if first else (previous is not None and previous.sum() == 3)


def test_megatron_sends_one_way(ranks: Ranks) -> None:
    ranks.run(one_way, 2, timeout=LIMIT)


# SGLang


def ring_of_three(steps: int) -> None:
    """Requests and proxy tensors go down the ring, outputs come back to the first stage."""
    with connected() as comm:
        group, rank = PipelineGroup(comm), comm.rank
        before, after = (rank - 1) % 3, (rank + 1) % 3
        works: list[Any] = []
        for step in range(steps):
            if group.is_first_rank:
                requests: list[Any] = [{"rid": f"r{step}", "ids": [step]}]
                hidden = torch.full((2 + step % 3, 4), float(step))
            else:
                requests = group.point_to_point_pyobj([], rank, None, before, rank)
                hidden = group.recv_tensor_dict(kind="proxy")["hidden_states"] + 1
            assert requests == [{"rid": f"r{step}", "ids": [step]}]
            if group.is_last_rank:
                message = {"next_token_ids": hidden.sum(1).long(), "__msg_type__": "output"}
            else:
                works += group.point_to_point_pyobj(
                    requests, rank, None, rank, after, async_send=True
                )
                message = {"hidden_states": hidden, "__msg_type__": "proxy"}
            works += group.send_tensor_dict(message, async_send=True)
        for step in range(steps) if group.is_first_rank else ():
            tokens = group.recv_tensor_dict(kind="output")["next_token_ids"]
            assert tokens.tolist() == [4 * (step + 2)] * (2 + step % 3)
        for work in works:
            work.work.wait(LIMIT)
        bystander = group.point_to_point_pyobj(["mine"], rank, None, 8, 9)
        assert bystander == ["mine"]


def test_sglang_sends_three_kinds_of_message_around_a_ring(ranks: Ranks) -> None:
    ranks.run(ring_of_three, 3, 7, timeout=LIMIT)


# TensorRT-LLM


class Dist(PointToPoint):
    def __init__(self, comm: commlayer.Communicator) -> None:
        self.comm = comm


def tagged() -> None:
    with connected() as comm:
        dist = Dist(comm)
        if comm.rank == 0:
            objects = [{"mb": tag, "x": np.arange(3)} for tag in range(4)]
            works = [dist.isend_object(value, 1, tag) for tag, value in enumerate(objects)]
            works.append(dist.isend(np.arange(5.0), 1, tag=9))
            for work in works:
                work.wait(LIMIT)
            dist.send(np.ones(2, dtype=np.int64), 1)
            dist.send_object("last", 1, tag=2)
        else:
            for tag in (3, 1, 0, 2):
                value = dist.recv_object(0, tag)
                assert value["mb"] == tag
                assert value["x"].tolist() == [0, 1, 2]
            into = np.zeros(5)
            assert dist.recv(into, 0, tag=9) is into
            assert into.tolist() == [0, 1, 2, 3, 4]
            assert dist.recv(np.zeros(2, dtype=np.int64), 0).tolist() == [1, 1]
            assert dist.recv_object(0, tag=2) == "last"


def test_tensorrt_llm_receives_tags_in_any_order(ranks: Ranks) -> None:
    ranks.run(tagged, 2, timeout=LIMIT)
