"""The rules: stable, complete, gated by facts, and each able to fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import vendor

from commlayer.conformance import Bench, Level, Outcome, Subject, all_rules, judge
from commlayer.conformance.clauses import CLAUSES
from commlayer.conformance.rules import find_rule
from commlayer.conformance.specification import specification
from commlayer.errors import CommError
from commlayer.semantics import Semantics
from commlayer.sim.profiles import PROFILES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gloo() -> Iterator[Bench]:
    with Bench(Subject("gloo"), schedules=8) as bench:
        yield bench


def outcome(rule: str, subject: Subject, schedules: int = 60) -> Outcome:
    with Bench(subject, schedules=schedules) as bench:
        return judge(find_rule(rule), bench).outcome


def test_every_clause_has_a_rule_and_every_rule_says_how_it_looks() -> None:
    rules = all_rules()
    assert {rule.clause.id for rule in rules} == set(CLAUSES)
    assert len({rule.id for rule in rules}) == len(rules)
    assert [rule.id for rule in rules if not rule.doc] == []


def test_a_level_includes_those_before_it() -> None:
    assert {rule.level for rule in all_rules(Level.L1)} == {Level.L0, Level.L1}


def test_the_specification_is_the_page_in_docs() -> None:
    assert (ROOT / "docs" / "specification.md").read_text() == specification(), (
        "run: commlayer conformance --specification > docs/specification.md"
    )


def test_gates_depend_on_declared_facts() -> None:
    polled, weakest = PROFILES["mpi"].semantics, Semantics()
    assert find_rule("L2-native-poll").applies(polled)
    assert find_rule("L2-native-poll").unmet(weakest) == "p2p.poll is exact"


def test_an_unknown_rule() -> None:
    with pytest.raises(CommError, match="no such rule"):
        find_rule("L2-nothing")


@pytest.mark.parametrize("rule", [r.id for r in all_rules(Level.L1)])
def test_gloo_on_its_declared_facts(gloo: Bench, rule: str) -> None:
    verdict = judge(find_rule(rule), gloo)
    assert verdict.outcome in (Outcome.PASSED, Outcome.NOT_APPLICABLE), verdict.message


def test_simulated_evidence_names_seed_schedules_and_bound(gloo: Bench) -> None:
    verdict = judge(find_rule("L1-drain"), gloo)
    first, second = verdict.evidence["explored"]
    assert first["schedules"] + first["pruned"] == 8
    assert not first["exhausted"]
    assert "budget 8" in first["bound"]
    assert (second["strategy"], second["seed"]) == ("random", 0)


@pytest.mark.parametrize("profile", ["adversary", "adversary_polled", "hccl", "xccl"])
@pytest.mark.parametrize("rule", ["L1-order", "L1-alive", "L1-wait-again", "L1-broadcast"])
def test_no_false_alarm_on_reference_facts(profile: str, rule: str) -> None:
    subject = vendor.of_profile(PROFILES[profile])
    assert outcome(rule, subject, 6) is Outcome.PASSED


@pytest.mark.parametrize("rule", ["L0-interface", "L0-viability", "L0-facts", "L0-sources"])
def test_wrong_shapes_fail(rule: str) -> None:
    assert outcome(rule, Subject(vendor.Wrong())) is Outcome.FAILED


def test_a_simulated_poll_that_lies_fails() -> None:
    lying = vendor.EarlyPoll(vendor.ExactPoll())
    assert outcome("L1-completed-exact", lying) is Outcome.FAILED
    assert outcome("L1-completed-exact", Subject(vendor.ExactPoll())) is Outcome.PASSED


def test_a_wait_that_returns_early_fails_on_processes() -> None:
    subject = Subject(vendor.EarlySends())
    with Bench(subject) as bench:
        verdict = judge(find_rule("L2-completed-exact"), bench)
    assert verdict.outcome is Outcome.FAILED
    assert "before the peer posted" in verdict.message


@pytest.mark.parametrize("rule", ["L2-peers-independent", "L2-wait-usable", "L2-native-order"])
def test_gloo_on_processes(gloo: Bench, rule: str) -> None:
    verdict = judge(find_rule(rule), gloo)
    assert verdict.outcome is Outcome.PASSED, verdict.message


def test_what_is_not_viable_reaches_the_simulator_only() -> None:
    subject = Subject(vendor.Declared())
    assert outcome("L1-drain", subject, 4) is Outcome.PASSED
    assert outcome("L2-drain", subject) is Outcome.NOT_RUN
