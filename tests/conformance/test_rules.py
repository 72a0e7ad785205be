"""The rules: stable, complete, gated by facts; that each can fail is in `test_kill_matrix`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import vendor
from commlayer_testkit.conformance import Lab, Level, Outcome, Rule, Subject, all_rules, judge
from commlayer_testkit.conformance.clauses import CLAUSES
from commlayer_testkit.conformance.rules import find_rule
from commlayer_testkit.conformance.specification import specification
from commlayer_testkit.sim.profiles import PROFILES

from commlayer.errors import CommError
from commlayer.semantics import Semantics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gloo() -> Iterator[Lab]:
    with Lab(Subject("gloo"), schedules=8) as lab:
        yield lab


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


def test_simulated_evidence_names_seed_schedules_and_bound(gloo: Lab) -> None:
    verdict = judge(find_rule("L1-drain"), gloo)
    first, second = verdict.evidence["explored"]
    assert first["schedules"] + first["pruned"] == 8
    assert not first["exhausted"]
    assert "budget 8" in first["bound"]
    assert (second["strategy"], second["seed"]) == ("random", 0)


def breaks(lab: Lab) -> None:
    """Fails."""
    raise AssertionError


def test_a_failure_without_a_message_names_its_line(gloo: Lab) -> None:
    verdict = judge(Rule(Level.L0, CLAUSES["named"], (), breaks), gloo)
    assert verdict.outcome is Outcome.FAILED
    assert re.fullmatch(r"test_rules\.py:\d+: raise AssertionError", verdict.message)


def test_what_is_not_viable_reaches_the_simulator_only() -> None:
    with Lab(Subject(vendor.Declared()), schedules=4) as lab:
        outcomes = [judge(find_rule(rule), lab).outcome for rule in ("L1-drain", "L2-drain")]
    assert outcomes == [Outcome.PASSED, Outcome.NOT_RUN]
