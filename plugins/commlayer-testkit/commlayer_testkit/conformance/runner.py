"""Judging rules: from a rule and a lab to a verdict."""

from __future__ import annotations

import time
import traceback
from pathlib import Path

from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.rules import Level, Rule
from commlayer_testkit.conformance.verdict import CannotRun, NotApplicable, Outcome, Verdict

_REAL = (Level.L2, Level.L3, Level.L4)


def judge(rule: Rule, lab: Lab) -> Verdict:
    """Run one rule.  Never raises for what the check raises, except to be interrupted."""
    unmet = rule.unmet(lab.subject.semantics)
    if unmet:
        return Verdict(rule=rule.id, outcome=Outcome.NOT_APPLICABLE, message=f"unless {unmet}")
    if rule.level in _REAL:
        viability = lab.subject.loaded.viability()
        if not viability.ok:
            return Verdict(
                rule=rule.id, outcome=Outcome.NOT_RUN, message=f"not viable: {viability.reason}"
            )
    lab.clear()
    outcome, message = Outcome.PASSED, ""
    began = time.monotonic()
    try:
        rule.check(lab)
    except CannotRun as error:
        outcome, message = Outcome.NOT_RUN, str(error)
    except NotApplicable as error:
        outcome, message = Outcome.NOT_APPLICABLE, str(error)
    except AssertionError as error:
        outcome, message = Outcome.FAILED, str(error) or _line_of(error)
    except Exception as error:
        outcome, message = Outcome.FAILED, f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - began, 3)
    evidence = lab.evidence
    lab.clear()
    return Verdict(
        rule=rule.id, outcome=outcome, message=message, evidence=evidence, seconds=seconds
    )


def _line_of(error: AssertionError) -> str:
    """Where an assertion without a message stands, and what it says."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
