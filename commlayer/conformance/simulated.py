"""The simulated world of a rule: the library itself on the declared facts, under exploration."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from commlayer.communicator import Communicator
from commlayer.sim import explorer
from commlayer.sim.explorer import Report, Strategy
from commlayer.sim.mount_core import mount
from commlayer.sim.rank import Rank, blank, filled
from commlayer.sim.scenario import Scenario
from commlayer.sim.transport import SimBackend
from commlayer.sim.world import World

if TYPE_CHECKING:
    from commlayer.conformance.bench import Bench
    from commlayer.conformance.subject import Subject

Body = Callable[["Stage", Rank], object]

_OPERATIONS, _BYTES = 8, 1 << 20


class Stage:
    """One execution: connects ranks, makes tensors where the subject's transport reads them.

    At the end nothing may be left: no send counted, no byte retained, no source alive.
    """

    def __init__(self, world: World, subject: Subject) -> None:
        self.world = world
        self._subject = subject
        self._companion = subject.companion()
        self._communicators: list[Communicator] = []
        self._sources: list[weakref.ref[Any]] = []
        world.at_end(self._check)

    @property
    def on_device(self) -> bool:
        return self._companion is not None

    def connect(self, rank: Rank, **config: Any) -> Communicator:
        """Connect a rank; bounded to 8 operations unless `config` says otherwise."""
        beside = None if self._companion is None else SimBackend(self.world, self._companion)
        bounds = {"max_inflight_ops": _OPERATIONS, "max_inflight_bytes": _BYTES}
        communicator = mount(
            rank, self._subject.simulated(rank), beside=beside, **{**bounds, **config}
        )
        self._communicators.append(communicator)
        return communicator

    def source(self, rank: Rank, value: int, nbytes: int = 16) -> torch.Tensor:
        """A tensor of that value in every byte, which must be freed at the end."""
        tensor = rank.arena.full(value, nbytes) if self.on_device else filled(value, nbytes)
        self._sources.append(weakref.ref(tensor.untyped_storage()))
        return tensor

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
        """Wait for what was given to the rank's device."""
        if self.on_device:
            rank.device.synchronize()

    def _check(self) -> None:
        for communicator in self._communicators:
            snapshot, rank = communicator.ledger.snapshot(), communicator.rank
            config = communicator.config
            assert snapshot.sends == 0, f"rank {rank} still counts {snapshot.sends} sends"
            assert snapshot.bytes == 0, f"rank {rank} still retains {snapshot.bytes} bytes"
            assert snapshot.peak_sends <= config.max_inflight_ops, (
                f"rank {rank} had {snapshot.peak_sends} sends in flight"
            )
        alive = sum(source() is not None for source in self._sources)
        assert alive == 0, f"{alive} source tensors are still alive"


def explore(
    bench: Bench,
    body: Body,
    size: int,
    *,
    early_ticks: int = 0,
    schedules: int | None = None,
) -> None:
    """Run ``body(stage, rank)`` under many schedules, and put into the evidence what was covered.

    First depth first within one deviation from the default schedule, then random
    walks from the bench's seed.  `early_ticks` as of `commlayer.sim.world.World`;
    `schedules` replaces the bench's bound.  Raises `AssertionError` for a failure.
    """
    profile = bench.subject.profile()

    def setup(world: World) -> None:
        stage = Stage(world, bench.subject)
        world.start(size, lambda rank: body(stage, rank))

    scenario = Scenario(body.__qualname__, setup, None, (profile.name,), early_ticks=early_ticks)
    budget = schedules or bench.schedules
    searches: list[tuple[Strategy, dict[str, Any]]] = [
        ("dfs", {"deviations": 1, "budget": budget}),
        ("random", {"seed": bench.seed, "budget": max(1, budget // 4)}),
    ]
    found = bench.evidence.setdefault("explored", [])
    for strategy, settings in searches:
        report = explorer.explore(scenario, on=profile, strategy=strategy, **settings)
        found.append(_evidence(report, bench.seed))
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
