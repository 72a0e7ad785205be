"""Scenarios: small functions that set up a world, and what is expected of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.world import World

Setup = Callable[[World], object]


@dataclass(frozen=True)
class Scenario:
    """A named set-up.

    `setup(world)` starts ranks and registers checks.  `expect` is the failure
    that exploring must find, or ``None`` if no schedule may fail.  `profiles`
    are the profiles for which that holds; the first is the default.  `early_ticks` is
    as of `World`.
    """

    name: str
    setup: Setup
    expect: FailureKind | None
    profiles: tuple[str, ...]
    early_ticks: int = 0

    @property
    def doc(self) -> str:
        """What it plays: the docstring of its set-up."""
        return (self.setup.__doc__ or "").strip()


_SCENARIOS: dict[str, Scenario] = {}


def scenario(
    *profiles: str, expect: FailureKind | None = None, early_ticks: int = 0
) -> Callable[[Setup], Setup]:
    """Register the decorated function as a scenario of its name."""

    def register(setup: Setup) -> Setup:
        name = setup.__name__
        _SCENARIOS[name] = Scenario(name, setup, expect, profiles, early_ticks)
        return setup

    return register


def on_ranks(
    size: int, *shared: Callable[[World], object]
) -> Callable[[Callable[..., object]], Setup]:
    """Make a set-up of the decorated function, which each of `size` ranks runs.

    It is called with its rank and what each of `shared` makes of the world.
    """

    def set_up(body: Callable[..., object]) -> Setup:
        @functools.wraps(body)
        def setup(world: World) -> None:
            made = [make(world) for make in shared]
            world.start(size, lambda rank: body(rank, *made))

        return setup

    return set_up


def all_scenarios() -> dict[str, Scenario]:
    """All scenarios by name, those of the library included."""
    import commlayer_testkit.sim.scenarios  # noqa: F401

    return dict(_SCENARIOS)


def find(name: str) -> Scenario:
    """The scenario `name`; raises `CommError` (CONFIG) for an unknown one."""
    known = all_scenarios()
    if name not in known:
        raise CommError(
            ErrorKind.CONFIG, f"scenario {name!r}", "there is no such scenario",
            "`commlayer sim list` names them",
        )  # fmt: skip
    return known[name]
