"""Every scenario ends as it says, on every profile it names.

``SIM_BUDGET`` is the number of schedules per scenario (a longer search
than the default suite's).
"""

from __future__ import annotations

import os

import pytest
from commlayer_testkit.sim import FailureKind, Scenario, all_scenarios, explore, replay

BUDGET = int(os.environ.get("SIM_BUDGET", "0"))
ALL = all_scenarios()
CORE = {name for name in ALL if name.startswith("core_")}


def pairs(names: set[str], *, fails: bool) -> list[tuple[Scenario, str]]:
    return [
        (ALL[name], on)
        for name in sorted(names)
        if (ALL[name].expect is not None) is fails
        for on in ALL[name].profiles
    ]


def ids(value: object) -> str:
    return value.name if isinstance(value, Scenario) else str(value)


@pytest.mark.parametrize(("scenario", "on"), pairs(set(ALL), fails=True), ids=ids)
def test_known_bad_policy_is_found(scenario: Scenario, on: str) -> None:
    report = explore(scenario, on=on, budget=5_000)
    assert report.failure is not None, str(report)
    assert report.failure.kind is scenario.expect, str(report)
    assert not report.exhausted
    again = replay(report.replay)
    assert again.failure is not None
    assert again.failure == report.failure


@pytest.mark.parametrize(("scenario", "on"), pairs(set(ALL) - CORE, fails=False), ids=ids)
def test_cure_survives_exploring(scenario: Scenario, on: str) -> None:
    report = explore(scenario, on=on, budget=BUDGET or 400)
    assert report.failure is None, str(report)
    assert report.steps_bound_hit == 0


@pytest.mark.parametrize(("scenario", "on"), pairs(CORE, fails=False), ids=ids)
def test_core_keeps_its_promises(scenario: Scenario, on: str) -> None:
    for strategy, budget in (("random", 10), ("pct", 5)):
        report = explore(scenario, on=on, strategy=strategy, budget=BUDGET or budget)  # type: ignore[arg-type]
        assert report.failure is None, str(report)
        assert report.steps_bound_hit == 0


@pytest.mark.parametrize(
    ("name", "on"),
    [("core_one_each_way", on) for on in ALL["core_one_each_way"].profiles]
    + [("core_two_each_way", on) for on in ("gloo", "adversary_serial")],
)
def test_core_is_exhausted_at_one_deviation(name: str, on: str) -> None:
    """Every schedule, and every free behaviour, that is one choice away from the default."""
    report = explore(name, on=on, deviations=1, budget=5_000)
    assert report.failure is None, str(report)
    assert report.exhausted, str(report)


@pytest.mark.skipif(not BUDGET, reason="SIM_BUDGET asks for the longer search")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "deviations", "on"),
    [("core_one_each_way", 2, "gloo")]
    + [("core_three_each_way", 1, on) for on in ALL["core_three_each_way"].profiles],
)
def test_core_is_exhausted_further(name: str, deviations: int, on: str) -> None:
    report = explore(name, on=on, deviations=deviations, budget=1_000_000)
    assert report.failure is None, str(report)
    assert report.exhausted, str(report)


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("exchange_one", "gloo"),
        ("exchange_two", "gloo"),
        ("exchange_two", "gloo_early_poll"),
        ("exchange_one", "mpi"),
        ("exchange_two", "mpi"),
    ],
)
def test_two_ranks_two_operations_are_exhausted(name: str, on: str) -> None:
    report = explore(name, on=on, budget=20_000)
    assert report.failure is None, str(report)
    assert report.exhausted, str(report)


CYCLES = {
    "blocking_metadata": ["metadata of rank 0", "metadata of rank 1"],
    "virtual_pipeline_blocking_metadata": [
        "metadata of fold send of batch 0",
        "metadata of send of batch 1",
    ],
    "virtual_pipeline_one_channel": [
        "receive of fold send of batch 0",
        "[send of batch 1",
        "receive of send of batch 1",
        "[fold send of batch 0",
    ],
    "late_device_receive": [
        "late device receive of rank 0",
        "device send of rank 0",
        "late device receive of rank 1",
        "device send of rank 1",
    ],
    "crossed_on_one_stream": [
        "receive of rank 0",
        "send of rank 0",
        "receive of rank 1",
        "send of rank 1",
    ],
    "broadcast_and_send_share_a_queue": [
        "send of hidden states",
        "broadcast of tokens",
        "receive of hidden states",
    ],
    "opposite_sends_at_the_bound": ["send 0 of rank 0", "send 0 of rank 1"],
    "send_first_everywhere": ["send of rank 0", "send of rank 1"],
    "first_use_of_a_pair": ["send of rank 0", "send of rank 1"],
}


@pytest.mark.parametrize("name", CYCLES)
def test_cycle_names_the_operations(name: str) -> None:
    failure = explore(name).failure
    assert failure is not None
    assert failure.kind is FailureKind.DEADLOCK
    cycle = "\n".join(failure.cycle)
    assert all(words in cycle for words in CYCLES[name]), cycle


def test_conditional_broadcast_names_the_step_and_both_ranks() -> None:
    failure = explore("conditional_broadcast").failure
    assert failure is not None
    text = str(failure)
    assert "tokens of step 0" in text
    assert "rank 0" in text
    assert "rank 1" in text


def test_lifetimes_name_the_lines() -> None:
    overwritten = str(explore("overwrite_before_completion").failure)
    assert overwritten.count("host.py:") == 2
    freed = str(explore("side_stream_without_retention").failure)
    assert "freed at device.py:" in freed
    assert "handed out again at device.py:" in freed
    assert "launched at device.py:" in freed
    dropped = str(explore("dropped_request").failure)
    assert "posted at host.py:" in dropped
    assert "dropped at host.py:" in dropped


def test_watchdog_says_when_and_what() -> None:
    failure = explore("virtual_pipeline_parked").failure
    assert failure is not None
    assert "after 1836 s" in failure.what
    assert "fold send of batch 0" in failure.what
