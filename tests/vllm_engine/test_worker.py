"""The engine's own worker code between the stages, over buffers that each step overwrites."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import groups
import torch
from commlayer_vllm import seams
from ranks import here
from ranks.pool import Ranks, collect
from vllm.sequence import IntermediateTensors
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker import gpu_worker

STEPS = 6
ROWS = 1 << 15


class OverwritingRunner:
    """A model whose output is one buffer, as with device graphs; the last stage keeps what came."""

    is_pooling_model = False

    def __init__(self, first: bool) -> None:
        self.first = first
        self.buffer = torch.zeros(ROWS, 8)
        self.step = 0
        self.received: list[torch.Tensor] = []

    def execute_model(self, _: Any, intermediate: Any) -> Any:
        self.step += 1
        if self.first:
            self.buffer.fill_(float(self.step))
            return IntermediateTensors({"hidden_states": self.buffer, "residual": self.buffer})
        self.received.append(intermediate.tensors["hidden_states"].clone())
        return EMPTY_MODEL_RUNNER_OUTPUT


def worker(group: Any) -> Any:
    """The engine's worker, with nothing but what a step needs."""
    gpu_worker.get_pp_group = lambda: group
    gpu_worker.get_tp_group = lambda: SimpleNamespace(world_size=1, rank_in_group=0)
    result = object.__new__(gpu_worker.Worker)
    result._pp_send_work = []
    result.use_v2_model_runner = False
    result.profiler = None
    result.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend="mp")
    )
    result.model_runner = OverwritingRunner(group.is_first_rank)
    return result


def stages(waits: bool, table: dict[str, Any]) -> list[float]:
    """What the last stage found in the tensors of each step.

    Without `waits` the worker gets the metadata handle alone, as one that does not
    wait for its tensors.
    """
    group = groups.pipeline()
    groups.installed(group, **table)
    if not waits:
        send = group.isend_tensor_dict
        group.isend_tensor_dict = lambda *arguments, **named: send(*arguments, **named)[:1]
    stage = worker(group)
    here.say("connected")
    here.hear()
    for step in range(STEPS):
        stage.execute_model(SimpleNamespace(total_num_scheduled_tokens=1))
        if group.is_first_rank and step in (0, STEPS - 1):
            here.say(f"step {step} is sent")
    groups.end(group)
    return [float(tensor.unique().item()) for tensor in stage.model_runner.received]


def received(ranks: Ranks, waits: bool, **table: Any) -> list[float]:
    """What `stages` gives while the last stage is stopped until the first can do no more."""
    first, last = ranks.spawn(stages, 2, waits, table, finalize=False)
    for process in (first, last):
        process.hear()
    last.stop()
    first.say("the last stage is stopped")
    assert first.hear() == "step 0 is sent"
    if waits:
        first.sleeping()
    else:
        first.hear()
    last.resume()
    last.say("go on")
    if waits:
        first.hear()
    return collect([first, last])[1]


RIGHT = [float(step) for step in range(1, STEPS + 1)]


def test_the_worker_overwrites_nothing_that_is_being_sent(ranks: Ranks) -> None:
    assert received(ranks, waits=True) == RIGHT


def test_without_the_handles_of_the_tensors_it_would(ranks: Ranks) -> None:
    assert received(ranks, waits=False) != RIGHT


def test_copies_make_a_worker_right_that_does_not_wait(ranks: Ranks) -> None:
    assert received(ranks, waits=False, retention="copy_on_post") == RIGHT


def not_waiting() -> str:
    seams.worker_waits = lambda: False
    group = groups.pipeline()
    comm = groups.installed(group).wire.comm  # type: ignore[attr-defined]
    assert comm.config.copy_max_bytes == 0
    groups.end(group)
    retention: str = comm.config.retention
    return retention


def test_copies_are_chosen_for_a_worker_that_does_not_wait(ranks: Ranks) -> None:
    assert seams.worker_waits(), "the worker of this engine waits"
    assert ranks.run(not_waiting, 2) == ["copy_on_post"] * 2
