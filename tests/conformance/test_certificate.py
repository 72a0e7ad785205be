"""Deviations, certificates, their files, and the comparison of two."""

from __future__ import annotations

import platform
from pathlib import Path

import msgspec
import pytest
import torch
import vendor
from commlayer_testkit.conformance import Level, Outcome, Subject, Verdict, all_rules
from commlayer_testkit.conformance.deviations import Deviations, load
from commlayer_testkit.conformance.probes import fact_names
from commlayer_testkit.conformance.probes.report import FactReport, ProbeReport
from commlayer_testkit.conformance.probes.report import Verdict as Measured
from commlayer_testkit.conformance.report import (
    Certificate,
    bound,
    certify,
    compare,
    decode,
    regressions,
)

from commlayer.errors import CommError

ENTRY = """
[[deviation]]
rule = "{rule}"
kind = "{kind}"
reason = "later"
issue = "https://example.org/1"
"""


def write(folder: Path, rule: str = "L1-drain", kind: str = "not_yet") -> Path:
    file = folder / "deviations.toml"
    file.write_text(ENTRY.format(rule=rule, kind=kind))
    return file


def certificate(
    deviations: Deviations | None = None,
    *,
    asked: Level = Level.L1,
    measured: ProbeReport | None = None,
    **outcomes: Outcome,
) -> Certificate:
    """Of a run in which every rule passed, but those named (with ``_`` for ``-``)."""
    given = {name.replace("_", "-"): outcome for name, outcome in outcomes.items()}
    verdicts = [
        Verdict(rule=r.id, outcome=given.get(r.id, Outcome.PASSED), message="why")
        for r in all_rules(asked)
    ]
    return certify(Subject(vendor.Declared()), asked, verdicts, deviations or {}, measured)


def test_everything_passed() -> None:
    found = certificate()
    assert (found.ok, found.level, found.simulated_only) == (True, Level.L1, True)


def test_a_failure_ends_the_levels() -> None:
    found = certificate(asked=Level.L2, L1_drain=Outcome.FAILED)
    assert (found.ok, found.level) == (False, Level.L0)
    assert list(found.errors) == ["L1-drain"]


def test_a_failure_that_says_nothing_is_an_error_too() -> None:
    (rule, *_) = all_rules(Level.L0)
    found = certify(
        Subject(vendor.Declared()), Level.L0, [Verdict(rule=rule.id, outcome=Outcome.FAILED)], {}
    )
    assert found.errors[rule.id] == "it failed"


def test_what_could_not_run_is_no_error_and_no_level() -> None:
    found = certificate(asked=Level.L2, L2_drain=Outcome.NOT_RUN)
    assert (found.ok, found.level, found.errors) == (False, Level.L1, {})


def test_a_rule_that_was_left_out_is_an_error() -> None:
    verdicts = [Verdict(rule=r.id, outcome=Outcome.PASSED) for r in all_rules(Level.L1)[:-1]]
    found = certify(Subject(vendor.Declared()), Level.L1, verdicts, {})
    assert list(found.errors.values()) == ["it was not judged at all"]
    assert found.level is Level.L0


@pytest.mark.parametrize(
    ("kind", "level"), [("not_yet", Level.L1), ("never", Level.L1), ("broken", Level.L0)]
)
def test_an_expected_failure(tmp_path: Path, kind: str, level: Level) -> None:
    found = certificate(load(write(tmp_path, kind=kind)), L1_drain=Outcome.FAILED)
    assert found.errors == {}
    assert found.level is level
    assert [deviation.rule for deviation in found.deviations] == ["L1-drain"]


@pytest.mark.parametrize(
    ("outcome", "says"),
    [(Outcome.PASSED, "it passes"), (Outcome.NOT_APPLICABLE, "not judged")],
)
def test_a_stale_deviation_is_an_error(tmp_path: Path, outcome: Outcome, says: str) -> None:
    found = certificate(load(write(tmp_path)), L1_drain=outcome)
    assert says in found.errors["L1-drain"]
    assert not found.ok


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (ENTRY.format(rule="L1-nothing", kind="never"), "no rule 'L1-nothing'"),
        (ENTRY.format(rule="L1-drain", kind="perhaps"), "perhaps"),
        (ENTRY.format(rule="L1-drain", kind="never") * 2, "named twice"),
        (ENTRY.format(rule="L1-drain", kind="never").replace("later", " "), "reason"),
        ("[[deviation]]\nrule = 'L1-drain'", "kind"),
        ("deviation = ", "deviations"),
    ],
)
def test_malformed_deviations(tmp_path: Path, text: str, cause: str) -> None:
    file = tmp_path / "deviations.toml"
    file.write_text(text)
    with pytest.raises(CommError, match=cause):
        load(file)


def probed(verdict: Measured) -> ProbeReport:
    fact = FactReport(fact="p2p.poll", verdict=verdict, declared="exact", measured="may_be_early")
    return ProbeReport(name="declared", c10d=False, versions={}, facts=(fact,), seconds=1.0)


def test_an_over_claimed_fact_refuses_certification() -> None:
    found = certificate(asked=Level.L2, measured=probed(Measured.OVER_CLAIMED))
    assert (found.ok, found.level) == (False, Level.L1)
    assert "over-claimed" in found.errors["fact p2p.poll"]
    assert certificate(asked=Level.L2, measured=probed(Measured.UNDER_CLAIMED)).ok


def test_a_certificate_is_read_as_it_was_written() -> None:
    found = certificate(measured=probed(Measured.CORRECT))
    assert decode(found.encode()).encode() == found.encode()


@pytest.mark.parametrize("schema", ["commlayer-conformance/2", ""])
def test_another_schema_is_refused(schema: str) -> None:
    with pytest.raises(CommError, match="schema"):
        decode(msgspec.structs.replace(certificate(), schema=schema).encode())
    with pytest.raises(CommError, match="certificate"):
        decode(b"{}")


def test_comparison() -> None:
    before, after = certificate(), certificate(L1_drain=Outcome.FAILED)
    assert compare(before, before) == []
    assert compare(before, after) == [
        ("level reached", "L1", "L0"),
        ("L1-drain", "passed", "failed"),
    ]
    assert regressions(before, after) == ["L1-drain", "level reached"]
    assert regressions(after, before) == []


def whole(**changes: object) -> ProbeReport:
    """A whole report of the backend of these tests, here and now, but for `changes`."""
    subject = Subject(vendor.Declared())
    facts = tuple(FactReport(fact=f, verdict=Measured.CORRECT, measured=1) for f in fact_names())
    report = ProbeReport(
        name=subject.name,
        c10d=False,
        versions={"torch": torch.__version__, **subject.loaded.versions()},
        host=platform.node(),
        facts=facts,
        seconds=1.0,
    )
    return msgspec.structs.replace(report, **changes)


def test_a_report_of_this_backend_here_and_now_is_taken() -> None:
    assert bound(whole(), Subject(vendor.Declared())) == whole()


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"name": "gloo"}, "of backend 'gloo'"),
        ({"c10d": True}, "of c10d backend"),
        ({"versions": {"torch": "1.0"}}, "it is of .*1.0"),
        ({"host": "elsewhere"}, "of host 'elsewhere'"),
        ({"facts": ()}, "lacks .*p2p.poll"),
    ],
    ids=str,
)
def test_another_report_is_refused(changes: dict[str, object], cause: str) -> None:
    with pytest.raises(CommError, match=cause):
        bound(whole(**changes), Subject(vendor.Declared()))


def test_a_certificate_says_which_facts_nobody_tried() -> None:
    assert any("not tried" in text for text in certificate().does_not_prove)
    unmeasured = FactReport(fact="p2p.poll", verdict=Measured.NOT_MEASURED)
    tried = tuple(f for f in whole().facts if f.fact != "p2p.poll")
    found = certificate(measured=whole(facts=(unmeasured, *tried)))
    assert "Declared, not tried: p2p.poll." in found.does_not_prove
    assert not any("not tried" in t for t in certificate(measured=whole()).does_not_prove)


@pytest.mark.parametrize("rule", ["L2-wait-usable", "L2-completed-exact", "L1-dropped-handle"])
def test_a_promise_of_the_handle_cannot_be_excused(tmp_path: Path, rule: str) -> None:
    with pytest.raises(CommError, match="cannot be excused"):
        load(write(tmp_path, rule, "never"))
    assert load(write(tmp_path, rule, "broken"))
