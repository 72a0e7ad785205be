"""Tasks, time, locks and events of a world, and what counts as stuck."""

from __future__ import annotations

import torch
from commlayer_testkit.sim import FailureKind, Rank, World, blank, filled, profile
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.world import StepBound


def play(body: object, size: int = 1, on: str = "gloo", **options: object) -> World:
    world = World(ReplayChoices(), profile(on), **options)  # type: ignore[arg-type]
    try:
        world.start(size, body)  # type: ignore[arg-type]
        world.run()
    finally:
        world.close()
    return world


def test_the_clock_jumps_when_all_are_blocked() -> None:
    seen = []

    def body(rank: Rank) -> None:
        for _ in range(3):
            rank.sleep(1000.0)
            seen.append(rank.runtime.now())

    assert play(body).failure is None
    assert seen == [1000.0, 2000.0, 3000.0]


def test_time_stands_still_while_something_can_run() -> None:
    seen = []

    def body(rank: Rank) -> None:
        for _ in range(50):
            rank.world.point()
        seen.append(rank.runtime.now())

    play(body)
    assert seen == [0.0]


def test_early_ticks_let_a_timeout_expire_while_something_can_run() -> None:
    def body(rank: Rank) -> None:
        flag = rank.event()
        rank.spawn(flag.set, "setter", daemon=True)
        assert not flag.wait(1.0), "set in time"

    assert play(body).failure is not None
    world = World(ReplayChoices([1, 0]), profile("gloo"), early_ticks=1)
    world.start(1, body)
    world.run()
    world.close()
    assert world.failure is None


def test_events_and_joins() -> None:
    order = []

    def body(rank: Rank) -> None:
        flag = rank.event()

        def helper() -> None:
            flag.wait()
            order.append("helper")

        task = rank.spawn(helper, "helper")
        assert task.is_alive()
        order.append("main")
        flag.set()
        assert flag.is_set()
        task.join()
        assert not task.is_alive()
        flag.clear()
        assert not flag.wait(0.5)

    assert play(body).failure is None
    assert order == ["main", "helper"]


def test_locks_exclude() -> None:
    inside = []

    def body(rank: Rank) -> None:
        lock = rank.lock()

        def critical(name: str) -> None:
            with lock:
                inside.append(name)
                rank.sleep(1.0)
                inside.append(name)

        tasks = [rank.spawn(lambda n=n: critical(n), n) for n in ("a", "b")]
        for task in tasks:
            task.join()

    assert play(body).failure is None
    assert inside[0] == inside[1]
    assert inside[2] == inside[3]


def test_a_lock_cycle_is_reported() -> None:
    def body(rank: Rank) -> None:
        first, second = rank.lock(), rank.lock()

        def other() -> None:
            with second:
                rank.sleep(1.0)
                with first:
                    pass

        rank.spawn(other, "other")
        with first:
            rank.sleep(1.0)
            with second:
                pass

    failure = play(body).failure
    assert failure is not None
    assert failure.kind is FailureKind.DEADLOCK
    assert {"the lock of rank 0", "the lock of rank 0 other"} <= set(failure.cycle)


def test_polling_for_ever_is_a_deadlock() -> None:
    def body(rank: Rank) -> None:
        if rank.index == 0:
            work = rank.endpoint().irecv(blank(), 1)
            while not work.is_completed():
                pass

    failure = play(body, size=2).failure
    assert failure is not None
    assert failure.kind is FailureKind.DEADLOCK
    assert any("polls" in line for line in failure.lines)


def test_polling_until_a_deadline_ends() -> None:
    def body(rank: Rank) -> None:
        work = rank.endpoint().irecv(blank(), 0)
        while not work.is_completed() and rank.runtime.now() < 3600.0:
            pass

    assert play(body).failure is None


def test_polling_with_sleeps_for_ever_is_a_deadlock() -> None:
    def body(rank: Rank) -> None:
        work = rank.endpoint().irecv(blank(), 0)
        while not work.is_completed():
            rank.sleep(0.001)

    failure = play(body).failure
    assert failure is not None
    assert failure.kind is FailureKind.DEADLOCK


def test_an_exception_names_the_rank_and_line() -> None:
    def body(rank: Rank) -> None:
        raise KeyError("hidden")

    failure = play(body).failure
    assert failure is not None
    assert failure.kind is FailureKind.ERROR
    assert "rank 0 raised KeyError" in failure.what
    assert "test_world.py" in failure.lines[-1]


def test_the_step_bound_is_no_failure() -> None:
    def body(rank: Rank) -> None:
        while True:
            rank.world.point()

    world = World(ReplayChoices(), profile("gloo"), max_steps=100)
    world.start(1, body)
    try:
        world.run()
    except StepBound:
        bounded = True
    world.close()
    assert bounded
    assert world.failure is None


def test_inference_mode_belongs_to_the_task() -> None:
    seen = []

    def body(rank: Rank) -> None:
        def helper() -> None:
            with torch.inference_mode():
                rank.sleep(1.0)
                seen.append(torch.is_inference_mode_enabled())
            seen.append(torch.is_inference_mode_enabled())

        task = rank.spawn(helper, "helper")
        rank.sleep(0.5)
        seen.append(torch.is_inference_mode_enabled())
        task.join()

    assert play(body).failure is None
    assert seen == [False, True, False]
    assert not torch.is_inference_mode_enabled()


def test_a_world_that_nobody_closes_leaves_the_threads_mode_alone() -> None:
    world = World(ReplayChoices(), profile("gloo"))

    def waits() -> None:
        with torch.inference_mode():
            world.block(lambda: False, "waits", world, 1.0)

    task = world.spawn(waits, "waits", rank=0)
    task.step()
    del task.run  # the collector may come to it first, and then to the task
    world.actors.clear()
    del task
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_closing_ends_every_task() -> None:
    ended = []

    def body(rank: Rank) -> None:
        def helper() -> None:
            try:
                rank.event().wait()
            finally:
                ended.append(rank.index)

        rank.spawn(helper, "helper", daemon=True)

    play(body, size=2)
    assert sorted(ended) == [0, 1]


def test_works_dropped_at_close_are_no_loss() -> None:
    def body(rank: Rank) -> None:
        if rank.index == 0:
            kept = rank.endpoint().isend(filled(1), 1)
            rank.spawn(lambda: (kept, rank.event().wait()), "keeper", daemon=True)

    assert play(body, size=2).failure is None
