"""A deterministic simulator of completion semantics.

Needs greenlet (``pip install commlayer[sim]``).  `World` plays ranks, lanes,
streams and memory; `explore` runs a scenario under many schedules; a scenario is
a function of a world, registered by `scenario`.
"""

from commlayer_testkit.sim.explorer import Report, Run, explore, replay
from commlayer_testkit.sim.failure import Failure, FailureKind
from commlayer_testkit.sim.profiles import PROFILES, Profile, profile
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import Scenario, all_scenarios, scenario
from commlayer_testkit.sim.world import World

__all__ = [
    "PROFILES",
    "Failure",
    "FailureKind",
    "Profile",
    "Rank",
    "Report",
    "Run",
    "Scenario",
    "World",
    "all_scenarios",
    "blank",
    "explore",
    "filled",
    "profile",
    "replay",
    "scenario",
]
