"""Write `docs/mutants.md`; with names of mutants or
levels (``L0 L1 L2``) measure their whole rows first.

L1 takes minutes, L2 (with L4) the better part of an hour.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from commlayer_testkit.conformance import Outcome

from mutants.lab import close_ranks, judged
from mutants.matrix import MUTANTS, also, page, rules_of, write_also

_PAGE = Path(__file__).parents[3] / "docs" / "mutants.md"
_SCHEDULES = 12


def measure(wanted: list[str]) -> None:
    """Judge every rule of its level on each mutant that is wanted, by name or level."""
    found = also()
    for mutant in MUTANTS:
        if not {mutant.name, mutant.killed_by[0][:2]} & set(wanted):
            continue
        quick = replace(mutant, schedules=_SCHEDULES)
        failed = [
            rule
            for rule in rules_of(mutant)
            if rule not in mutant.killed_by and judged(quick, rule).outcome is Outcome.FAILED
        ]
        found[mutant.name] = failed
        print(f"{mutant.name}: {', '.join(failed)}", flush=True)
        write_also(found)


measure(sys.argv[1:])
close_ranks()
_PAGE.write_text(page())
