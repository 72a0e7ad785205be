"""The whole engine over two and three stages: the same tokens, all messages by commlayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from runs import EngineRuns

pytestmark = pytest.mark.timeout(1800)

TOKENS = {"prompts": 24, "prompt_tokens": [3, 40], "tokens": 24, "seed": 1}
MANY_STEPS = {"prompts": 8, "prompt_tokens": [3, 40], "tokens": 1300, "seed": 2}
"""Two batches of four sequences in flight: 2,600 steps."""
MEBI = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> EngineRuns:
    return EngineRuns(tmp_path_factory.mktemp("engine"))


Result = dict[str, Any]


@pytest.fixture(scope="module")
def one_stage(engine: EngineRuns) -> Result:
    return engine(stages=1, commlayer={}, sequences=4, rounds=[TOKENS])[0]


@pytest.fixture(scope="module")
def stock(engine: EngineRuns) -> Result:
    """The stock engine over two stages, on its process groups."""
    rounds = [TOKENS, MANY_STEPS, MANY_STEPS]
    return engine(stages=2, commlayer=None, sequences=4, rounds=rounds, shared_memory=False)[0]


@pytest.fixture(scope="module")
def ours(engine: EngineRuns) -> tuple[Result, str]:
    return engine(stages=2, commlayer={}, sequences=4, rounds=[TOKENS, MANY_STEPS, MANY_STEPS])


def all_ours(result: Result, stages: int, tensor_ranks: int = 1) -> None:
    """Every step of every stage sent and received one dict by commlayer, and nothing otherwise."""
    for workers in result["workers"]:
        assert len(workers) == stages * tensor_ranks
        for worker in workers:
            counts = worker["commlayer"]
            assert worker["stock"] == 0
            assert worker["steps"] > 0
            first, last = worker["stage"] == 0, worker["stage"] == stages - 1
            assert counts.get("dicts sent", 0) == (0 if last else worker["steps"])
            assert counts.get("dicts received", 0) == (0 if first else worker["steps"])


def test_one_stage_has_nothing_to_replace(one_stage: Result) -> None:
    assert [worker["commlayer"] for worker in one_stage["workers"][0]] == [None]
    prompts = {tuple(tokens) for tokens in one_stage["tokens"][0]}
    assert len(prompts) == TOKENS["prompts"], "each prompt has tokens of its own"


def test_two_stages_give_the_tokens_of_one_and_of_the_stock_engine(
    one_stage: Result, stock: Result, ours: tuple[Result, str]
) -> None:
    assert ours[0]["tokens"][0] == one_stage["tokens"][0]
    assert ours[0]["tokens"] == stock["tokens"]


def test_every_message_between_two_stages_is_ours(stock: Result, ours: tuple[Result, str]) -> None:
    all_ours(ours[0], 2)
    assert all(worker["commlayer"] is None for worker in stock["workers"][0])
    assert all(worker["stock"] > worker["steps"] for worker in stock["workers"][0])


def test_three_stages_give_the_same_tokens(engine: EngineRuns, one_stage: Result) -> None:
    result, _ = engine(stages=3, commlayer={}, sequences=4, rounds=[TOKENS])
    assert result["tokens"] == one_stage["tokens"]
    all_ours(result, 3)


def test_two_stages_of_two_tensor_ranks_give_the_tokens_of_the_stock_engine(
    engine: EngineRuns,
) -> None:
    few = {**TOKENS, "prompts": 6, "tokens": 8}
    plan: dict[str, Any] = {"stages": 2, "tensor_ranks": 2, "sequences": 4, "rounds": [few]}
    # Four workers that spin on shared memory are slow on two cores.
    plan["shared_memory"] = False
    result, _ = engine(commlayer={}, **plan)
    assert result["tokens"] == engine(commlayer=None, **plan)[0]["tokens"]
    all_ours(result, 2, tensor_ranks=2)


def test_the_log_says_what_was_replaced_and_what_was_sent(ours: tuple[Result, str]) -> None:
    result, log = ours
    for rank in (0, 1):
        (line,) = (line for line in log.splitlines() if f"commlayer: rank {rank} of 2" in line)
        assert "backend gloo" in line
        assert "isend_tensor_dict" in line
        assert "GPUModelRunner._pp_broadcast_prev_sampled_token_ids" in line
        assert "the worker waits before it overwrites them" in line
    steps = result["workers"][-1][0]["steps"]
    assert f"commlayer: closed; {steps} dicts sent" in log
    assert f"commlayer: closed; {steps} dicts received" in log


def growth(result: Result) -> list[int]:
    """How much each worker grew over the last round, in bytes."""
    before, after = result["workers"][-2:]
    return [b["resident"] - a["resident"] for a, b in zip(before, after, strict=True)]


def test_memory_is_flat_over_5000_steps(
    stock: Result, ours: tuple[Result, str], record_property: Callable[[str, object], None]
) -> None:
    result = ours[0]
    assert result["workers"][-1][0]["steps"] > 5000
    for worker in result["workers"][-1]:
        assert worker["retained"] <= 4, "what is in flight, not what was sent"
    record_property("growth of the stock engine's workers", growth(stock))
    record_property("growth of our workers", growth(result))
    assert max(growth(result)) < max(8 * MEBI, 2 * max(growth(stock)))


def test_a_killed_stage_is_a_named_error_and_no_hang(engine: EngineRuns) -> None:
    result, log = engine(stages=2, commlayer={}, sequences=4, rounds=[TOKENS], kill=0, timeout=300)
    assert result["killed"]["error"] == "EngineDeadError"
    assert "PeerLost: " in log
    assert "rank 0" in log[log.index("PeerLost: ") :]
