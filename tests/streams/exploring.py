"""Bodies of ranks on a simulated transport, under schedules by chance."""

from __future__ import annotations

from collections.abc import Callable

from commlayer_testkit.sim.explorer import Report, explore
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenario import Scenario
from commlayer_testkit.sim.world import World


def searched(body: Callable[[Rank], object], on: str, *, ranks: int = 2, budget: int) -> Report:
    """What `budget` schedules of `body` on every rank show; none is cut short."""

    def setup(world: World) -> None:
        world.start(ranks, body)

    scenario = Scenario("searched", setup, None, (on,))
    report = explore(scenario, on=on, strategy="random", budget=budget)
    assert report.steps_bound_hit == 0
    return report


def survives(body: Callable[[Rank], object], on: str, *, ranks: int = 2, budget: int) -> None:
    """Fail if a schedule does."""
    report = searched(body, on, ranks=ranks, budget=budget)
    assert report.failure is None, str(report)
