"""The engine's own broadcasts of sampled and draft tokens, over commlayer."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import groups
import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import pp_utils

from commlayer import CommError, ErrorKind

REQUESTS = 5


def no_native(*_: Any, **__: Any) -> None:
    raise AssertionError("the engine's own broadcast was called")


# The first runner


def first_runner(skips: bool = False, requests: int = REQUESTS) -> Any:
    """What its broadcasts use of the runner."""
    runner = object.__new__(gpu_model_runner.GPUModelRunner)
    runner.device = torch.device("cpu")
    runner._pp_recv_work = None
    runner._is_all_reqs_chunked_prefill = lambda: skips
    runner.requests = {}
    runner.discard_request_mask = SimpleNamespace(np=np.zeros(requests, dtype=bool))
    runner.input_batch = SimpleNamespace(
        num_reqs=requests,
        req_ids=[str(i) for i in range(requests)],
        num_tokens_no_spec=np.zeros(requests, dtype=np.int32),
        is_token_ids=np.zeros((requests, 16), dtype=bool),
        prev_sampled_token_ids=None,
    )
    return runner


def sampled(step: int) -> torch.Tensor:
    return torch.arange(REQUESTS, dtype=torch.int32).view(-1, 1) + 100 * step


def first_runner_steps() -> dict[str, int]:
    group = groups.pipeline()
    gpu_model_runner.get_pp_group = lambda: group
    ours = groups.installed(group)
    dist.broadcast = no_native
    runner = first_runner()
    for step in range(4):
        if group.is_last_rank:
            tokens = sampled(step)
            runner._pp_broadcast_prev_sampled_token_ids(tokens)
            tokens.fill_(-1)
        else:
            runner._pp_receive_prev_sampled_token_ids_to_input_batch()
            runner._pp_recv_work.wait()
            assert torch.equal(runner.input_batch.prev_sampled_token_ids, sampled(step))
    skipping = first_runner(skips=True)
    if group.is_last_rank:
        skipping._pp_broadcast_prev_sampled_token_ids(sampled(9))
    else:
        skipping._pp_receive_prev_sampled_token_ids_to_input_batch()
        assert skipping._pp_recv_work is None
    counts = dict(ours.counts)
    groups.end(group)
    return counts


def test_the_first_runner_broadcasts_sampled_tokens(ranks: Ranks) -> None:
    first, second, last = ranks.run(first_runner_steps, 3)
    assert first == second == {"tokens received": 4}
    assert last == {"tokens sent": 4}


def sender_does_not_wait() -> None:
    group = groups.pipeline()
    gpu_model_runner.get_pp_group = lambda: group
    groups.installed(group)
    runner = first_runner()
    if group.is_last_rank:
        for step in range(8):
            runner._pp_broadcast_prev_sampled_token_ids(sampled(step))
        here.meet("all is sent")
    else:
        here.meet("all is sent")
        for step in range(8):
            runner._pp_receive_prev_sampled_token_ids_to_input_batch()
            runner._pp_recv_work.wait()
            assert torch.equal(runner.input_batch.prev_sampled_token_ids, sampled(step))
    groups.end(group)


def test_the_last_stage_waits_for_no_receiver(ranks: Ranks) -> None:
    ranks.run(sender_does_not_wait, 2)


def disagreeing_widths() -> None:
    group = groups.pipeline()
    gpu_model_runner.get_pp_group = lambda: group
    groups.installed(group)
    if group.is_last_rank:
        first_runner()._pp_broadcast_prev_sampled_token_ids(sampled(1))
    else:
        runner = first_runner(requests=REQUESTS + 2)
        runner._pp_receive_prev_sampled_token_ids_to_input_batch()
        with pytest.raises(CommError, match=r"shape \[5, 1\].*shape \[7, 1\]") as caught:
            runner._pp_recv_work.wait()
        assert caught.value.kind is ErrorKind.PROTOCOL
    groups.end(group)


def test_stages_that_disagree_on_the_width_raise_instead_of_hanging(ranks: Ranks) -> None:
    ranks.run(disagreeing_widths, 2)


# The second runner


class Stream:
    """A stream of a machine without one."""

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> str:
        return "event"


def handler(group: Any, drafts: int) -> Any:
    """The engine's handler of the second runner, without its device."""
    result = object.__new__(pp_utils.PPHandler)
    result.is_last_rank, result.last_rank = group.is_last_rank, group.last_rank
    result.max_sample_len, result.num_speculative_steps = drafts + 1, drafts
    result.device = torch.device("cpu")
    result.main_stream = result.broadcast_stream = Stream()
    result.queue = deque([] if group.is_last_rank else [None] * group.world_size)
    result.req_idx_gen_np = np.zeros(16, dtype=np.int32)
    result.broadcast_group = group.device_group
    return result


def batch() -> Any:
    return SimpleNamespace(
        num_reqs=REQUESTS,
        num_computed_tokens_np=np.full(REQUESTS, 8),
        num_scheduled_tokens=np.ones(REQUESTS, dtype=np.int32),
        prefill_len_np=np.full(REQUESTS, 4),
        max_seq_len_np=None,
        idx_mapping=torch.arange(REQUESTS),
        idx_mapping_np=np.arange(REQUESTS),
    )


def second_runner_steps(drafts: int) -> dict[str, int]:
    group = groups.pipeline()
    ours = groups.installed(group)
    dist.broadcast = no_native
    torch.cuda.stream = lambda _: torch.no_grad()  # type: ignore[assignment,misc]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[assignment,method-assign]
    side = handler(group, drafts)
    for step in range(3):
        tokens = torch.arange(REQUESTS, dtype=torch.int64).view(-1, 1) + 100 * step
        counts = torch.full((2, REQUESTS), step, dtype=torch.int32)
        proposed = torch.arange(16 * drafts).view(16, drafts) + step
        if group.is_last_rank:
            side.broadcast(tokens, counts[0], counts[1], batch())
            if drafts:
                side.broadcast_drafts(proposed, batch())
        else:
            assert side.receive(batch())
            slot = side.queue[-1]
            assert torch.equal(slot.sampled_tokens[:, :1], tokens)
            assert torch.equal(torch.stack([slot.num_sampled, slot.num_rejected]), counts)
            if drafts:
                assert torch.equal(slot.draft_tokens, proposed[:REQUESTS])
    result = dict(ours.counts)
    groups.end(group)
    return result


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_second_runner_broadcasts_tokens_counts_and_drafts(ranks: Ranks, drafts: int) -> None:
    first, last = ranks.run(second_runner_steps, 2, drafts)
    kinds = ["tokens", "counts", *(["drafts"] if drafts else [])]
    assert first == {f"{kind} received": 3 for kind in kinds}
    assert last == {f"{kind} sent": 3 for kind in kinds}


def put_back() -> None:
    before = vars(gpu_model_runner.GPUModelRunner)["_pp_broadcast_prev_sampled_token_ids"]
    group = groups.pipeline()
    ours = groups.installed(group)
    after = vars(gpu_model_runner.GPUModelRunner)["_pp_broadcast_prev_sampled_token_ids"]
    assert after is not before
    ours.uninstall()
    assert vars(gpu_model_runner.GPUModelRunner)["_pp_broadcast_prev_sampled_token_ids"] is before
    ours.wire.close()


def test_the_methods_of_the_runners_are_put_back(ranks: Ranks) -> None:
    ranks.run(put_back, 2)


def another_engine() -> None:
    """As in a process that makes and destroys one engine after another."""
    for _ in range(2):
        group = groups.pipeline()
        gpu_model_runner.get_pp_group = lambda group=group: group
        ours = groups.installed(group)
        runner = first_runner()
        if group.is_last_rank:
            runner._pp_broadcast_prev_sampled_token_ids(sampled(1))
        else:
            runner._pp_receive_prev_sampled_token_ids_to_input_batch()
            runner._pp_recv_work.wait()
        assert sum(ours.counts.values()) == 1
        group.destroy()


def test_destroying_the_group_puts_them_back_for_another_engine(ranks: Ranks) -> None:
    ranks.run(another_engine, 2)
