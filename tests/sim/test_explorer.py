"""Exploring, shrinking, replaying, and saying honestly what was covered."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch.distributed as dist
from commlayer_testkit.sim import (
    FailureKind,
    Rank,
    Scenario,
    World,
    blank,
    explore,
    filled,
    profile,
    replay,
    scenario,
)
from commlayer_testkit.sim.choices import RandomChoices, decode, encode
from commlayer_testkit.sim.explorer import run
from commlayer_testkit.sim.scenario import find
from commlayer_testkit.sim.trace import trace_events, write_trace
from torch.distributed import distributed_c10d as c10d

from commlayer.errors import CommError


def a_rare_race(world: World) -> None:
    """Fails only if two helpers both run between two points of the main task."""

    def body(rank: Rank) -> None:
        seen: list[str] = []
        for name in ("a", "b"):
            rank.spawn(lambda n=name: (world.point(), seen.append(n)), name)
        world.point()
        before = len(seen)
        world.point()
        assert (before, len(seen)) != (0, 2), "both helpers ran in between"
        for _ in range(5):
            world.point()

    world.start(1, body)


RARE = Scenario("a_rare_race", a_rare_race, FailureKind.ERROR, ("gloo",))


@pytest.mark.parametrize("strategy", ["dfs", "random", "pct"])
def test_every_strategy_finds_the_race_and_shrinks_it(strategy: str) -> None:
    report = explore(RARE, strategy=strategy, budget=5_000)  # type: ignore[arg-type]
    assert report.failure is not None
    assert "both helpers" in report.failure.what
    assert sum(map(bool, report.choices)) <= 4


def test_bounds_are_said() -> None:
    assert explore(RARE, preemptions=0, budget=1_000).bound.startswith(
        "every schedule of at most 0 preemptions"
    )
    bounded = explore("exchange_two", budget=5)
    assert not bounded.exhausted
    assert "bound hit" in str(bounded)
    assert "budget 5 schedules" in bounded.bound
    done = explore("exchange_one", budget=1_000)
    assert done.exhausted
    assert "exhausted" in str(done)
    sampled = explore("exchange_one", strategy="random", budget=50)
    assert not sampled.exhausted
    assert sampled.schedules == 50


def test_larger_bounds_cover_more_schedules() -> None:
    counts = [explore("exchange_one", preemptions=n, budget=10_000) for n in (0, 1, 2)]
    assert all(report.exhausted for report in counts)
    assert counts[0].schedules < counts[1].schedules < counts[2].schedules


def test_a_seed_fixes_the_schedule() -> None:
    exchange, gloo = find("exchange_two"), profile("gloo")
    one = run(exchange, gloo, RandomChoices(7), logged=True)
    two = run(exchange, gloo, RandomChoices(7), logged=True)
    assert one.log == two.log
    assert one.choices == two.choices
    assert run(exchange, gloo, RandomChoices(8)).choices != one.choices


def test_hidden_nondeterminism_is_found() -> None:
    draw = random.Random(0)

    def unsteady(world: World) -> None:
        def body(rank: Rank) -> None:
            for _ in range(draw.randrange(5)):
                world.point()

        world.start(2, body)

    report = explore(
        Scenario("unsteady", unsteady, None, ("gloo",)), strategy="random", verify_every=5
    )
    assert report.failure is not None
    assert report.failure.kind is FailureKind.NONDETERMINISM


def test_a_schedule_that_is_cut_off_is_not_counted_as_covered() -> None:
    def endless(world: World) -> None:
        def body(rank: Rank) -> None:
            while True:
                world.point()

        world.start(1, body)

    report = explore(Scenario("endless", endless, None, ("gloo",)), budget=3, max_steps=50)
    assert report.failure is None
    assert report.steps_bound_hit > 0
    assert not report.exhausted


def test_a_scenario_of_ones_own() -> None:
    @scenario("gloo", expect=FailureKind.DEADLOCK)
    def mine(world: World) -> None:
        """Nobody sends."""
        world.start(2, lambda rank: rank.endpoint().recv(blank(), 1 - rank.index))

    report = explore("mine")
    assert report.failure is not None
    assert report.replay.startswith("mine@gloo:")
    assert replay(report.replay).failure == report.failure


def test_checks_at_the_end_fail_the_schedule() -> None:
    def leaves(world: World) -> None:
        def check() -> None:
            raise AssertionError("something is left")

        world.start(1, lambda rank: None)
        world.at_end(check)

    failure = explore(Scenario("leaves", leaves, None, ("gloo",))).failure
    assert failure is not None
    assert "something is left" in failure.what


def test_choices_round_trip() -> None:
    draw = random.Random(3)
    for _ in range(200):
        choices = [draw.choice([0, 0, 0, 1, 2]) for _ in range(draw.randrange(30))]
        while choices and not choices[-1]:
            choices.pop()
        assert decode(encode(choices)) == choices


@pytest.mark.parametrize("text", ["", "1", "a=b", "1=2=3", "1=-1", "99999999=1", "1=1,"])
def test_malformed_choices(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(text)


@pytest.mark.parametrize(
    "text", ["", "nothing", "nobody@gloo:-", "exchange_one@nowhere:-", "exchange_one@gloo:x"]
)
def test_malformed_replay_strings(text: str) -> None:
    with pytest.raises(CommError):
        replay(text)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(CommError, match="no such scenario"):
        explore("nobody")
    with pytest.raises(CommError, match="no such profile"):
        explore("exchange_one", on="nowhere")
    with pytest.raises(CommError, match="no such strategy"):
        explore("exchange_one", strategy="guess")  # type: ignore[arg-type]


def test_trace_is_a_chrome_trace(tmp_path: Path) -> None:
    result = run(find("virtual_pipeline"), profile("hccl"), RandomChoices(1), logged=True)
    events = trace_events(result.log)["traceEvents"]
    rows = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"rank 0", "rank 1", "rank 0 stream of 'fold'"} <= rows
    times = [event["ts"] for event in events if event["ph"] == "X"]
    assert times == sorted(times)
    write_trace(tmp_path / "trace.json", result.log)
    assert msgspec.json.decode((tmp_path / "trace.json").read_bytes())["traceEvents"] == events


def test_the_torch_mount_leaves_nothing_behind() -> None:
    outside = c10d._world
    for name in ("distributed_exchange", "distributed_send_first", "distributed_objects"):
        explore(name, budget=20)
        assert c10d._world is outside
        assert not dist.is_initialized()


def test_two_ranks_in_one_process_have_their_own_torch_world() -> None:
    from commlayer_testkit.sim.mount_torch import start_distributed

    seen: dict[int, tuple[int, int, bool]] = {}

    def setup(world: World) -> None:
        def body(rank: Rank) -> None:
            mine = filled(1)
            work = dist.isend(mine, 1) if rank.index == 0 else dist.irecv(mine, 0)
            assert work is not None
            work.wait()
            seen[rank.index] = (dist.get_rank(), dist.get_world_size(), work.is_completed())

        start_distributed(world, 2, body)

    assert explore(Scenario("worlds", setup, None, ("gloo",)), budget=50).failure is None
    assert seen == {0: (0, 2, True), 1: (1, 2, True)}
