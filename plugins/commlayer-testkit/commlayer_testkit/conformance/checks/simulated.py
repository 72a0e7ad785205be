"""L1: the library on the declared facts, under all schedules that the search covers.

A rule of this level plays a promise of `commlayer_testkit.sim.scenarios.promises`.
"""

from __future__ import annotations

import functools

from commlayer_testkit.conformance.gates import ANY_THREAD, HOST_MEMORY, WAITED_IN
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.rules import Gate, Level, rule
from commlayer_testkit.conformance.verdict import NotApplicable
from commlayer_testkit.sim.scenarios.promises import PROMISES

_GATES: dict[str, tuple[Gate, ...]] = {
    "wait-threads": (ANY_THREAD,),
    "idle": (ANY_THREAD, WAITED_IN),
    "released": (ANY_THREAD,),
    "copy-on-post": (HOST_MEMORY,),
}
"""Where a promise means something only on some facts."""


def _play(clause: str, lab: Lab) -> None:
    promise = PROMISES[clause]
    if clause == "copy-on-post" and lab.subject.companion() is not None:
        raise NotApplicable("the copy is work of a device stream, and no call that is simulated")
    # A third rank multiplies the steps of a schedule.
    share = len(promise.bodies) * (promise.size - 1)
    for body in promise.bodies:
        lab.explore(
            body,
            promise.size,
            early_ticks=promise.early_ticks,
            schedules=max(1, lab.schedules // share),
        )


def _register(clause: str) -> None:
    check = functools.partial(_play, clause)
    check.__doc__ = PROMISES[clause].doc
    rule(Level.L1, clause, *_GATES.get(clause, ()))(check)


for _clause in PROMISES:
    _register(_clause)
