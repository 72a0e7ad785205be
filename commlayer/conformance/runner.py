"""Judging rules: from a rule and a bench to a verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from commlayer.conformance.bench import Bench
from commlayer.conformance.rules import Level, Rule
from commlayer.conformance.verdict import CannotRun, NotApplicable, Outcome, Verdict

_REAL = (Level.L2, Level.L3, Level.L4)


def judge(rule: Rule, bench: Bench) -> Verdict:
    """Run one rule.  Never raises for what the check raises, except to be interrupted."""
    unmet = rule.unmet(bench.subject.semantics)
    if unmet:
        return Verdict(rule=rule.id, outcome=Outcome.NOT_APPLICABLE, message=f"unless {unmet}")
    if rule.level in _REAL:
        viability = bench.subject.loaded.viability()
        if not viability.ok:
            return Verdict(
                rule=rule.id, outcome=Outcome.NOT_RUN, message=f"not viable: {viability.reason}"
            )
    bench.clear()
    outcome, message = Outcome.PASSED, ""
    began = time.monotonic()
    try:
        rule.check(bench)
    except CannotRun as error:
        outcome, message = Outcome.NOT_RUN, str(error)
    except NotApplicable as error:
        outcome, message = Outcome.NOT_APPLICABLE, str(error)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        outcome, message = Outcome.FAILED, kind + str(error)
    seconds = round(time.monotonic() - began, 3)
    evidence = bench.evidence
    bench.clear()
    return Verdict(
        rule=rule.id, outcome=outcome, message=message, evidence=evidence, seconds=seconds
    )


def judge_all(rules: Iterable[Rule], bench: Bench) -> Iterator[Verdict]:
    """The verdicts of `rules`, one after another."""
    for rule in rules:
        yield judge(rule, bench)
