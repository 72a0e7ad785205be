"""The pruned search finds a failure if there is one, and otherwise reaches every outcome."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from commlayer_testkit.sim.choices import Pruned
from commlayer_testkit.sim.profiles import profile
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.search import DepthFirst, Sampling, Search
from commlayer_testkit.sim.world import World

Program = list[list[str]]
SAMPLES = 1_000


def random_program(seed: int, device: bool) -> Program:
    """A few operations on each of two ranks, not all of them wise."""
    draw = random.Random(seed)
    host = ["send", "recv", "wait", "poll", "write", "drop", "event", "lock", "wait"]
    stream = ["dsend", "drecv", "wait", "kernel", "side", "free", "poll", "wait"]
    return [
        [draw.choice(stream if device else host) for _ in range(draw.randint(2, 3))]
        for _ in range(2)
    ]


def play(world: World, program: Program, seen: list[object]) -> None:
    """Run `program`; append what each rank observes, rank by rank."""
    observed: list[list[object]] = [[], []]

    def body(rank: Rank) -> None:
        data, peer, mine = rank.endpoint(), 1 - rank.index, observed[rank.index]
        works, tensors = [], []
        flag, lock = rank.event(), rank.lock()

        def helper() -> None:
            with lock:
                mine.append("helper")
            flag.set()

        for number, what in enumerate(program[rank.index]):
            if what in ("send", "dsend"):
                make = rank.arena.full if what == "dsend" else filled
                tensors.append(make(number + 1, 16))
                works.append(data.isend(tensors[-1], peer))
            elif what in ("recv", "drecv"):
                tensors.append(rank.arena.empty(16) if what == "drecv" else blank(16))
                works.append(data.irecv(tensors[-1], peer))
            elif what == "wait" and works:
                works.pop(0).wait()
                if not rank.arena.find(tensors[0]):
                    mine.append(tensors[0].tolist()[::15])
            elif what == "poll" and works:
                mine.append(works[-1].is_completed())
            elif what == "write" and tensors:
                tensors[-1].fill_(99)
            elif what == "drop" and works:
                works.pop()
                tensors.pop()
            elif what == "event":
                rank.spawn(helper, f"helper {number}", daemon=True)
                mine.append(flag.wait(1.0))
            elif what == "lock":
                rank.spawn(helper, f"helper {number}", daemon=True)
                with lock:
                    mine.append("main")
            elif what == "wait last":
                works.pop().wait()
            elif what == "write first":
                tensors[0].fill_(99)
            elif what == "drop first":
                del works[0], tensors[0]
            elif what == "pause":
                world.point()
            elif what == "blink":
                rank.spawn(lambda: (flag.wait(), mine.append("woke")), "sleeper", daemon=True)
                flag.set()
                flag.clear()
            elif what == "kernel" and tensors:
                rank.device.launch("kernel", lambda t: t.fill_(7), writes=[tensors[-1]])
            elif what == "side" and tensors:
                with rank.device.stream():
                    rank.device.launch("side", lambda t: None, reads=[tensors[-1]])
            elif what == "free" and tensors:
                tensors.pop()
        if any(what in ("kernel", "side") for what in program[rank.index]):
            rank.device.synchronize()

    world.start(2, body)
    seen.append(observed)


def outcomes(
    search: Search, setup: Callable[[World, list[object]], None], on: str, limit: int = 20_000
) -> set[str]:
    found: set[str] = set()
    for _ in range(limit):
        choices = search.next()
        if choices is None:
            return found
        seen: list[object] = []
        world = World(choices, profile(on))
        try:
            setup(world, seen)
            world.run()
        except Pruned:
            continue
        finally:
            world.close()
            search.done(len(choices.taken))
        failure = world.failure
        found.add(f"{failure.kind.value if failure else 'fine'} {seen if not failure else ''}")
    if isinstance(search, DepthFirst):
        pytest.fail("the search is too large for this test; draw a smaller program")
    return found


def missed(setup: Callable[[World, list[object]], None], on: str, seed: int = 0) -> set[str]:
    """Outcomes that samples reach and the pruned search does not.

    A failure ends its run, and exploring, so a search that found one owes no more.
    """
    covered = outcomes(DepthFirst(), setup, on)
    if any(not outcome.startswith("fine") for outcome in covered):
        return set()
    return outcomes(Sampling("random", seed), setup, on, SAMPLES) - covered


RACES = {
    "write races with the read": [["send", "pause", "write", "wait"], ["recv", "wait"]],
    "drop races with the match": [["send", "pause", "drop"], ["recv", "wait"]],
    "write after another receive": [
        ["send", "recv", "wait last", "write first"],
        ["recv", "send", "wait", "wait"],
    ],
    "drop after another receive": [
        ["send", "recv", "wait last", "drop first"],
        ["recv", "send", "wait", "wait"],
    ],
    "two drops": [["send", "send", "drop"], ["recv", "drop", "recv"]],
    "poll races with delivery": [["send", "poll", "wait"], ["recv", "poll", "wait"]],
    "an event is set and cleared": [["blink"], []],
    "both ways": [["send", "recv", "wait", "write"], ["send", "recv", "wait", "wait"]],
}


@pytest.mark.parametrize("on", ["gloo", "mpi", "adversary", "unordered"])
@pytest.mark.parametrize("race", RACES)
def test_pruning_keeps_both_ends_of_a_race(on: str, race: str) -> None:
    setup = lambda world, seen: play(world, RACES[race], seen)  # noqa: E731
    assert not missed(setup, on)


@pytest.mark.parametrize("on", ["gloo", "gloo_early_poll", "mpi", "adversary", "unordered"])
@pytest.mark.parametrize("seed", range(5))
def test_pruning_keeps_every_outcome_on_host_transports(on: str, seed: int) -> None:
    program = random_program(seed, device=False)
    setup = lambda world, seen: play(world, program, seen)  # noqa: E731
    assert not missed(setup, on)


@pytest.mark.parametrize("on", ["hccl", "nccl"])
@pytest.mark.parametrize("seed", range(5))
def test_pruning_keeps_every_outcome_on_streams(on: str, seed: int) -> None:
    program = random_program(100 + seed, device=True)
    setup = lambda world, seen: play(world, program, seen)  # noqa: E731
    assert not missed(setup, on)
