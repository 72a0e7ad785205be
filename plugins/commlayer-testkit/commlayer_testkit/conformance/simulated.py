"""The simulated world of a rule: the library itself on the declared facts, under exploration."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commlayer.communicator import Communicator
from commlayer_testkit.sim import explorer
from commlayer_testkit.sim.explorer import Report, Strategy
from commlayer_testkit.sim.leftovers import BOUNDS, Leftovers
from commlayer_testkit.sim.mount_core import mount
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import Scenario
from commlayer_testkit.sim.transport import SimBackend
from commlayer_testkit.sim.world import World

if TYPE_CHECKING:
    from commlayer_testkit.conformance.lab import Lab
    from commlayer_testkit.conformance.subject import Subject

Body = Callable[["Stage", Rank], object]


class Stage:
    """One execution: connects ranks, makes tensors where the subject's transport reads them.

    At the end nothing may be left: no send counted, no byte retained, no source alive.
    """

    def __init__(self, world: World, subject: Subject) -> None:
        self.world = world
        self._subject = subject
        self._companion = subject.companion()
        self._leftovers = Leftovers(world)

    @property
    def on_device(self) -> bool:
        return self._companion is not None

    def connect(self, rank: Rank, **config: Any) -> Communicator:
        """Connect a rank; bounded to 8 operations unless `config` says otherwise."""
        beside = None if self._companion is None else SimBackend(self.world, self._companion)
        return self._leftovers.communicator(
            mount(rank, self._subject.simulated(rank), beside=beside, **{**BOUNDS, **config})
        )

    def source(self, rank: Rank, value: int, nbytes: int = 16) -> torch.Tensor:
        """A tensor of that value in every byte, which must be freed at the end."""
        make = rank.arena.full if self.on_device else filled
        return self._leftovers.source(make(value, nbytes))

    def target(self, rank: Rank, nbytes: int = 16) -> torch.Tensor:
        """A tensor to receive into."""
        return rank.arena.empty(nbytes) if self.on_device else blank(nbytes)

    def overwrite(self, rank: Rank, tensor: torch.Tensor, value: int) -> None:
        """Write `value` into a tensor, as work of the current stream where there is one."""
        if self.on_device:
            rank.device.launch("overwrite", lambda data: data.fill_(value), writes=[tensor])
        else:
            tensor.fill_(value)

    def expect(self, rank: Rank, tensor: torch.Tensor, value: int) -> None:
        """Use a result: every byte must be `value`."""

        def look(data: torch.Tensor) -> None:
            found = data.tolist()
            assert found == [value] * len(found), f"expected {value} everywhere, got {found}"

        if self.on_device:
            rank.device.launch("use", look, reads=[tensor])
        else:
            look(tensor)

    def settle(self, rank: Rank) -> None:
        """Wait for what was given to the rank's device; done for every rank whose body returns."""
        if self.on_device:
            rank.device.synchronize()


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
        stage = Stage(world, lab.subject)

        def play(rank: Rank) -> None:
            body(stage, rank)
            stage.settle(rank)

        world.start(size, play)

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
