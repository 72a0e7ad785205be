"""The kit is tested itself: mutants fail, reference backends pass.

By default each mutant meets the rules that must kill it; with ``MUTANTS=all`` in
the environment every wrong fact is probed and the stronger reference is run whole.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import vendor
from commlayer_testkit.conformance import Level, Outcome, Subject, all_rules, judge
from commlayer_testkit.conformance.probes import Verdict as Measured
from commlayer_testkit.conformance.probes import probe
from commlayer_testkit.conformance.rules import find_rule
from commlayer_testkit.sim.profiles import PROFILES
from mutants.declared import WRONG_FACTS, WrongFact
from mutants.lab import MutantLab, close_ranks, judged
from mutants.matrix import MUTANTS, NO_MUTANT, also, page
from mutants.mutant import Mutant
from mutants.processes import EXACT, Exact, Lying

ALL = os.environ.get("MUTANTS") == "all"
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"
RULES = [rule.id for rule in all_rules(Level.L4)]
PROCESS_RULES = [rule.id for rule in all_rules(Level.L4) if rule.level in (Level.L2, Level.L4)]
SHAPE_RULES = [rule.id for rule in all_rules(Level.L0)]
NATIVE_RULES = [rule for rule in PROCESS_RULES if rule.startswith("L2-native")]
REFERENCES = ("gloo", "mpi", "hccl", "nccl", "xccl", "adversary", "adversary_polled")


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    yield
    close_ranks()


def fine(subject: Subject, rule: str, schedules: int = 3) -> str:
    """Nothing where the rule passes or does not apply, else why it does not."""
    verdict = judge(find_rule(rule), MutantLab(subject, schedules))
    if verdict.outcome in (Outcome.PASSED, Outcome.NOT_APPLICABLE):
        return ""
    return f"{rule} {verdict.outcome.value}: {verdict.message}"


@pytest.mark.parametrize(
    ("mutant", "rule"),
    [
        pytest.param(mutant, rule, id=f"{mutant.name}-{rule}")
        for mutant in MUTANTS
        for rule in mutant.killed_by
    ],
)
def test_mutant_is_killed(mutant: Mutant, rule: str) -> None:
    verdict = judged(mutant, rule)
    assert verdict.outcome is Outcome.FAILED, f"it survives: {verdict}"
    assert re.search(mutant.says, verdict.message), verdict.message


@pytest.mark.parametrize("profile", REFERENCES)
def test_no_false_alarm_on_declared_facts(profile: str) -> None:
    subject = vendor.of_profile(PROFILES[profile])
    rules = [rule.id for rule in all_rules(Level.L1) if rule.id != "L0-options-refused"]
    assert [why for rule in rules if (why := fine(subject, rule))] == []


@pytest.mark.parametrize("rule", [*SHAPE_RULES, *PROCESS_RULES])
def test_no_false_alarm_on_gloo(rule: str) -> None:
    assert fine(Subject("gloo"), rule) == ""


@pytest.mark.parametrize("rule", PROCESS_RULES if ALL else NATIVE_RULES)
def test_no_false_alarm_on_a_stronger_transport(rule: str) -> None:
    assert fine(Subject(Lying(Exact, EXACT)), rule) == ""


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(wrong, id=wrong.name) for wrong in WRONG_FACTS if wrong.quick or ALL],
)
def test_wrong_fact_is_reported(wrong: WrongFact) -> None:
    (fact,) = probe(wrong.backend(), facts=[wrong.fact], patience=0.5).facts
    assert fact.verdict is (Measured.OVER_CLAIMED if wrong.over else Measured.UNDER_CLAIMED)


def test_every_rule_kills_a_mutant_or_says_why_not() -> None:
    killers = {rule for mutant in MUTANTS for rule in mutant.killed_by}
    assert sorted(killers & NO_MUTANT.keys()) == []
    assert sorted(killers | NO_MUTANT.keys()) == sorted(RULES)


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert sorted(also().keys() - set(names)) == []


def test_the_matrix_is_the_page_in_docs() -> None:
    assert PAGE.read_text() == page(), "run `python -m mutants` in tests/conformance"
