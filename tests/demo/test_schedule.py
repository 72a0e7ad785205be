"""The schedule: what every rank relies on without asking the others."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from commlayer_demo.schedule import Limits, MicroBatch, Scheduler, Step
from hypothesis import given
from hypothesis import strategies as st

STOP = 0
LIMITS = st.builds(
    Limits,
    max_tokens=st.integers(1, 6),
    micro_batch=st.integers(1, 4),
    in_flight=st.integers(1, 4),
    prefill_chunk=st.integers(1, 5),
)
PROMPTS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=12), min_size=1, max_size=9)


def sampled(step: Step, seed: int) -> list[int]:
    """Tokens that depend on the step's requests and on the seed alone; some are STOP."""
    return [random.Random(f"{seed} {s}").randrange(4) for s in step.segments if s.samples]


def drive(scheduler: Scheduler, seed: int, ahead: bool) -> list[Step]:
    """Run all batches in turn; `ahead` plans the next batch before the current one is computed."""
    steps: list[Step] = []
    turns: deque[tuple[MicroBatch, list[Step | None]]] = deque(
        (batch, []) for batch in scheduler.batches
    )
    while turns:
        batch, planned = turns.popleft()
        step = planned.pop() if planned else scheduler.plan(batch)
        if step is None:
            continue
        if ahead and turns and not turns[0][1]:
            turns[0][1].append(scheduler.plan(turns[0][0]))
        steps.append(step)
        scheduler.advance(step, sampled(step, seed))
        turns.append((batch, planned))
    return steps


@given(PROMPTS, LIMITS, st.integers(0, 9))
def test_a_rank_that_plans_ahead_plans_the_same(
    prompts: list[list[int]], limits: Limits, seed: int
) -> None:
    late = drive(Scheduler(prompts, limits, [STOP]), seed, ahead=False)
    early = drive(Scheduler(prompts, limits, [STOP]), seed, ahead=True)
    assert late == early


@given(PROMPTS, LIMITS, st.integers(0, 9))
def test_every_token_is_computed_once_in_order_and_every_request_ends(
    prompts: list[list[int]], limits: Limits, seed: int
) -> None:
    scheduler = Scheduler(prompts, limits, [STOP])
    computed: list[list[int]] = [[] for _ in prompts]
    for step in drive(scheduler, seed, ahead=True):
        assert 1 <= len(step.segments) <= limits.micro_batch
        for segment in step.segments:
            assert segment.start == len(computed[segment.request])
            assert 1 <= len(segment.tokens) <= limits.prefill_chunk
            computed[segment.request] += segment.tokens
    for request, (prompt, tokens) in enumerate(zip(prompts, scheduler.generated(), strict=True)):
        assert computed[request] == [*prompt, *tokens[:-1]]
        assert len(computed[request]) <= scheduler.capacity(request)
        assert STOP not in tokens[:-1]
        assert tokens[-1] == STOP or len(tokens) == limits.max_tokens


@given(PROMPTS, LIMITS)
def test_a_step_in_the_midst_of_a_prompt_samples_nothing(
    prompts: list[list[int]], limits: Limits
) -> None:
    for step in drive(Scheduler(prompts, limits, [STOP]), 0, ahead=True):
        rows = [(s, last) for s in step.segments for last in _lasts(len(s.tokens))]
        expected = [
            row
            for row, (segment, last) in enumerate(rows)
            if last and segment.start + len(segment.tokens) >= len(prompts[segment.request])
        ]
        assert step.sampling_rows == expected
        assert len(step.sampling) == len(expected)


def _lasts(length: int) -> Sequence[bool]:
    return [False] * (length - 1) + [True]


def test_a_waiting_request_takes_the_place_of_one_that_ended() -> None:
    limits = Limits(max_tokens=2, micro_batch=2, in_flight=1, prefill_chunk=8)
    scheduler = Scheduler([[1], [2], [3]], limits, [STOP])
    (batch,) = scheduler.batches
    first = scheduler.plan(batch)
    assert first is not None
    assert scheduler.advance(first, [STOP, 5]) == [0]
    second = scheduler.plan(batch)
    assert second is not None
    assert [segment.request for segment in second.segments] == [1, 2]


def test_no_more_micro_batches_than_there_is_work_for() -> None:
    limits = Limits(max_tokens=1, micro_batch=2, in_flight=5, prefill_chunk=8)
    assert len(Scheduler([[1], [2], [3]], limits, [STOP]).batches) == 2


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Scheduler([[]], Limits(1, 1, 1, 1), [STOP])
