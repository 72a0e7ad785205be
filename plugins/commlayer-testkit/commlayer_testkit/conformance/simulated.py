"""The simulated world of a rule: the library itself on the declared facts, under exploration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from commlayer.communicator import Communicator
from commlayer_testkit.sim import explorer
from commlayer_testkit.sim.explorer import Report, Strategy
from commlayer_testkit.sim.mount_core import mount
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenario import Scenario
from commlayer_testkit.sim.stage import Stage
from commlayer_testkit.sim.transport import SimBackend
from commlayer_testkit.sim.world import World

if TYPE_CHECKING:
    from commlayer_testkit.conformance.lab import Lab
    from commlayer_testkit.conformance.subject import Subject

Body = Callable[[Stage, Rank], object]


def stage_of(world: World, subject: Subject) -> Stage:
    """A stage of the subject's transport, as its facts are declared."""
    companion = subject.companion()

    def connected(rank: Rank, **config: Any) -> Communicator:
        beside = None if companion is None else SimBackend(world, companion)
        return mount(rank, subject.simulated(rank), beside=beside, **config)

    return Stage(world, connected, on_device=companion is not None)


def explore(
    lab: Lab,
    body: Body,
    size: int,
    *,
    early_ticks: int = 0,
    schedules: int | None = None,
) -> None:
    """Run ``body(stage, rank)`` under many schedules, and put into the evidence what was covered.

    First depth first within one deviation from the default schedule, then random
    walks from the lab's seed.  `early_ticks` as of `commlayer_testkit.sim.world.World`;
    `schedules` replaces the lab's bound.  Raises `AssertionError` for a failure.
    """
    profile = lab.subject.profile()

    def setup(world: World) -> None:
        stage_of(world, lab.subject).start(body, size)

    scenario = Scenario(body.__qualname__, setup, None, (profile.name,), early_ticks=early_ticks)
    budget = schedules or lab.schedules
    searches: list[tuple[Strategy, dict[str, Any]]] = [
        ("dfs", {"deviations": 1, "budget": budget}),
        ("random", {"seed": lab.seed, "budget": max(1, budget // 4)}),
    ]
    found = lab.evidence.setdefault("explored", [])
    for strategy, settings in searches:
        report = explorer.explore(scenario, on=profile, strategy=strategy, **settings)
        found.append(_evidence(report, lab.seed))
        if report.failure is not None:
            raise AssertionError(
                f"{report.failure}\nfound after {report.found_after} schedules; "
                f"choices {report.choices}"
            )


def _evidence(report: Report, seed: int) -> dict[str, Any]:
    return {
        "strategy": report.strategy,
        "seed": seed if report.strategy == "random" else None,
        "schedules": report.schedules,
        "pruned": report.pruned,
        "exhausted": report.exhausted,
        "bound": report.bound,
        "seconds": round(report.seconds, 3),
    }
