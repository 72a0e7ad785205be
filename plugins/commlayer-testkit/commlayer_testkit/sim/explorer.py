"""Running a scenario under many schedules, and making a failure short.

Strategies (`commlayer_testkit.sim.search`): ``random`` walks with a seed; ``pct`` gives
actors random priorities; ``dfs`` enumerates depth first, either every schedule up
to commuting steps, or every schedule within a bound on preemptions or deviations.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.sim.choices import Choices, Pruned, ReplayChoices, decode, encode
from commlayer_testkit.sim.explain import recording_writes
from commlayer_testkit.sim.failure import Failure, FailureKind
from commlayer_testkit.sim.profiles import Profile, profile
from commlayer_testkit.sim.scenario import Scenario, find
from commlayer_testkit.sim.search import DepthFirst, Sampling, Search
from commlayer_testkit.sim.world import StepBound, World

Strategy = Literal["dfs", "random", "pct"]
Log = list[tuple[int, float, str, str, str]]


@dataclass
class Run:
    """One schedule: its choices, and how it ended."""

    choices: list[int]
    steps: int
    failure: Failure | None
    bounded: bool = False
    """The run was cut off by its step bound."""
    pruned: bool = False
    log: Log = field(default_factory=list)


@dataclass
class Report:
    """What exploring found.  `exhausted`: every schedule within the stated bounds was covered."""

    scenario: str
    profile: str
    strategy: str
    schedules: int
    pruned: int
    steps_bound_hit: int
    exhausted: bool
    bound: str
    seconds: float
    failure: Failure | None
    replay: str
    found_after: int
    choices: list[int]

    @property
    def per_second(self) -> float:
        """Schedules per second, pruned ones included."""
        return (self.schedules + self.pruned) / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        state = "exhausted" if self.exhausted else "bound hit" if not self.failure else "stopped"
        lines = [
            f"{self.scenario} on {self.profile}: {self.strategy}, {self.schedules} schedules "
            f"({self.pruned} pruned) in {self.seconds:.2f} s, {self.per_second:.0f}/s; "
            f"{state} ({self.bound})"
        ]
        if self.steps_bound_hit:
            lines.append(f"  {self.steps_bound_hit} schedules were cut off by the step bound")
        if self.failure is not None:
            lines += [str(self.failure), f"  found after {self.found_after} schedules"]
            lines.append(f"  replay: {self.replay}")
        return "\n".join(lines)


def run(
    scenario: Scenario,
    on: Profile,
    choices: Choices,
    *,
    explain: bool = False,
    logged: bool = False,
    max_steps: int = 50_000,
) -> Run:
    """Run one schedule of `scenario`."""
    log: Log | None = [] if logged else None
    world = World(
        choices, on, explain=explain, log=log, max_steps=max_steps,
        early_ticks=scenario.early_ticks,
    )  # fmt: skip
    bounded = pruned = False
    with recording_writes(world) if explain else nullcontext():
        try:
            scenario.setup(world)
            world.run()
        except StepBound:
            bounded = True
        except Pruned:
            pruned = True
        finally:
            world.close()
    return Run(choices.taken, world.steps, world.failure, bounded, pruned, log or [])


@contextmanager
def _no_garbage_collection() -> Iterator[Callable[[int], None]]:
    """Collect between schedules only: a work that a collection drops is a choice nobody made."""
    was = gc.isenabled()
    gc.freeze()
    gc.disable()

    def between(count: int) -> None:
        if count % 200 == 0:
            gc.collect()

    try:
        yield between
    finally:
        gc.unfreeze()
        if was:
            gc.enable()


def explore(
    scenario: Scenario | str,
    *,
    on: Profile | str | None = None,
    strategy: Strategy = "dfs",
    budget: int = 10_000,
    seconds: float | None = None,
    seed: int = 0,
    preemptions: int | None = None,
    deviations: int | None = None,
    verify_every: int = 100,
    max_steps: int = 50_000,
    shrink: bool = True,
) -> Report:
    """Explore until a failure, the end of the schedules, or the budget.

    `budget` counts schedules, `seconds` limits wall-clock time.  Every
    `verify_every`-th schedule is run twice more and compared (0: never).
    """
    if isinstance(scenario, str):
        scenario = find(scenario)
    on = profile(on or scenario.profiles[0]) if not isinstance(on, Profile) else on
    search = _search(strategy, seed, preemptions, deviations)
    began = time.perf_counter()
    schedules = pruned = cut = 0
    failure: Failure | None = None
    taken: list[int] = []
    exhausted = False
    run(scenario, on, ReplayChoices(), max_steps=max_steps)  # first uses: see `_explained`
    with _no_garbage_collection() as between:
        while schedules + pruned < budget:
            if seconds is not None and time.perf_counter() - began > seconds:
                break
            choices = search.next()
            if choices is None:
                exhausted = True
                break
            result = run(scenario, on, choices, max_steps=max_steps)
            search.done(len(result.choices))
            pruned += result.pruned
            schedules += not result.pruned
            cut += result.bounded
            failure, taken = result.failure, result.choices
            between(schedules + pruned)
            if failure is None and verify_every and schedules % verify_every == 0:
                failure = _verify(scenario, on, result, max_steps)
            if failure is not None:
                break
        elapsed = time.perf_counter() - began
        explains = failure is not None and failure.kind is not FailureKind.NONDETERMINISM
        if failure is not None and explains and shrink:
            taken = _shrink(scenario, on, taken, failure.kind, max_steps)
    if explains:
        failure = _explained(scenario, on, taken).failure or failure
    replay = f"{scenario.name}@{on.name}:{encode(taken)}" if failure else ""
    return Report(
        scenario.name, on.name, strategy, schedules, pruned, cut, exhausted and not cut,
        search.bound + f", budget {budget} schedules" * (not exhausted),
        elapsed, failure, replay, schedules + pruned if failure else 0, taken,
    )  # fmt: skip


def replay(text: str, *, logged: bool = False) -> Run:
    """Run the schedule that a replay string names, with lines recorded.

    Raises `CommError` (CONFIG) for a malformed string or an unknown name.
    """
    head, _, tail = text.strip().partition(":")
    name, _, on = head.partition("@")
    try:
        choices = decode(tail)
    except ValueError as error:
        raise CommError(
            ErrorKind.CONFIG, f"replay {text!r}", str(error), "Copy the whole string"
        ) from error
    found = find(name)
    return _explained(found, profile(on or found.profiles[0]), choices, logged=logged)


def _explained(
    scenario: Scenario, on: Profile, choices: Sequence[int], *, logged: bool = False
) -> Run:
    """The run with lines recorded.

    It is run twice: what Python and torch do on first use may keep frames, and
    with them tensors, alive until the next garbage collection.
    """
    with _no_garbage_collection():
        run(scenario, on, ReplayChoices(choices), explain=True)
        gc.collect()
        return run(scenario, on, ReplayChoices(choices), explain=True, logged=logged)


def _search(strategy: str, seed: int, preemptions: int | None, deviations: int | None) -> Search:
    if strategy == "dfs":
        return DepthFirst(preemptions=preemptions, deviations=deviations)
    if strategy in ("random", "pct"):
        return Sampling(strategy, seed)
    raise CommError(
        ErrorKind.CONFIG, f"strategy {strategy!r}", "there is no such strategy",
        "Use dfs, random or pct",
    )  # fmt: skip


def _verify(scenario: Scenario, on: Profile, result: Run, max_steps: int) -> Failure | None:
    """Run the same choices twice more and compare everything that happened."""
    one, two = (
        run(scenario, on, ReplayChoices(result.choices), logged=True, max_steps=max_steps)
        for _ in range(2)
    )
    same = one.log == two.log and one.choices == two.choices and one.failure == two.failure
    kinds = {r.failure.kind if r.failure else None for r in (one, result)}
    if same and len(kinds) == 1 and (result.pruned or one.steps == result.steps):
        return None
    at = next((n for n, (a, b) in enumerate(zip(one.log, two.log)) if a != b), 0)  # noqa: B905
    return Failure(
        FailureKind.NONDETERMINISM,
        "the same choices gave two different runs: the scenario depends on more than them",
        (),
        tuple(f"run {n}: {log[at]}" for n, log in ((1, one.log), (2, two.log)) if at < len(log)),
    )


def _shrink(
    scenario: Scenario, on: Profile, taken: Sequence[int], kind: FailureKind, max_steps: int
) -> list[int]:
    """Fewer and smaller deviations that still fail in the same way."""
    tries = 400

    def fails(candidate: Sequence[int]) -> list[int] | None:
        nonlocal tries
        tries -= 1
        result = run(scenario, on, ReplayChoices(candidate), max_steps=max_steps)
        if result.failure is not None and result.failure.kind is kind:
            return _trimmed(result.choices)
        return None

    best = _trimmed(taken)
    size = max(len(best) // 2, 1)
    while tries > 0:
        improved = False
        for start in range(len(best) - 1, -1, -size):
            low = max(start - size + 1, 0)
            if tries <= 0 or not any(best[low : start + 1]):
                continue
            candidate = [*best[:low], *[0] * (start + 1 - low), *best[start + 1 :]]
            shorter = fails(candidate)
            if shorter is not None and _cost(shorter) < _cost(best):
                best, improved = shorter, True
                break
        if improved:
            size = min(size, max(len(best) // 2, 1))
        elif size == 1:
            break
        else:
            size //= 2
    return best


def _cost(choices: Sequence[int]) -> tuple[int, int, int]:
    return (sum(1 for c in choices if c), sum(choices), len(choices))


def _trimmed(choices: Sequence[int]) -> list[int]:
    end = len(choices)
    while end and choices[end - 1] == 0:
        end -= 1
    return list(choices[:end])
