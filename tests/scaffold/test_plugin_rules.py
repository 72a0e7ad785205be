"""A plugin adds rules of its own to the kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commlayer_testkit.conformance import Clause, Gate, Lab, Level, Outcome, Rule, Subject, judge
from commlayer_testkit.conformance.deviations import load
from commlayer_testkit.conformance.report import certify
from commlayer_testkit.conformance.rules import all_rules

from commlayer.errors import CommError
from commlayer.hooks import hookimpl
from commlayer.semantics import Semantics


def _fails(lab: Lab) -> None:
    """Fails."""
    raise AssertionError("as it should")


TAGS = Gate("tags", lambda semantics: semantics.tags)
MINE = Rule(Level.L0, Clause("mine-holds", "Mine", "What is mine holds."), (TAGS,), _fails)


class Provider:
    def __init__(self, *rules: Rule) -> None:
        self.rules = list(rules)
        self.asked: list[Semantics] = []

    @hookimpl
    def commlayer_conformance_rules(self, semantics: Semantics) -> list[Rule]:
        self.asked.append(semantics)
        return self.rules


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Iterator[tuple[Subject, Provider]]:
    provider = Provider(*getattr(request, "param", (MINE,)))
    subject = Subject("gloo")
    subject.registry.register(provider)
    yield subject, provider
    subject.registry.unregister(provider)


def test_its_rules_come_after_the_kits_at_their_level(subject: tuple[Subject, Provider]) -> None:
    made, provider = subject
    rules = made.rules(Level.L1)
    kit = all_rules(Level.L1)
    shape = [rule for rule in kit if rule.level is Level.L0]
    assert rules == [*shape, MINE, *kit[len(shape) :]]
    assert provider.asked == [made.semantics]


def test_its_rule_is_judged_certified_and_excused(
    subject: tuple[Subject, Provider], tmp_path: Path
) -> None:
    made, _ = subject
    with Lab(made) as lab:
        verdicts = [judge(rule, lab) for rule in made.rules(Level.L0)]
    assert (verdicts[-1].rule, verdicts[-1].outcome) == ("L0-mine-holds", Outcome.FAILED)
    certificate = certify(made, Level.L0, verdicts, {})
    assert certificate.level is None
    assert certificate.errors["L0-mine-holds"] == "as it should"
    file = tmp_path / "deviations.toml"
    file.write_text(
        '[[deviation]]\nrule = "L0-mine-holds"\nkind = "never"\nreason = "r"\nissue = "i"\n'
    )
    with pytest.raises(CommError, match="no rule"):
        load(file)
    excused = certify(made, Level.L0, verdicts, load(file, made.rules()))
    assert [deviation.rule for deviation in excused.deviations] == ["L0-mine-holds"]
    assert "L0-mine-holds" not in excused.errors


@pytest.mark.parametrize("subject", [(MINE, MINE), (all_rules()[0],), ("L0-text",)], indirect=True)
def test_what_cannot_be_added(subject: tuple[Subject, Provider]) -> None:
    with pytest.raises(CommError, match="commlayer_conformance_rules"):
        subject[0].rules()
