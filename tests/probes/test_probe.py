"""Probes tell what is declared wrongly, either way, and nothing else."""

from __future__ import annotations

from typing import Any

import claims
import pytest
from commlayer_gloo import SEMANTICS, GlooBackend
from commlayer_testkit.conformance.probes import FactReport, ProbeReport, Verdict, probe, probe_c10d

from commlayer import semantics
from commlayer.errors import CommError, ErrorKind
from commlayer.semantics import OperationSemantics, Semantics

HARMLESS = ("p2p.poll", "p2p.wait_repeatable", "p2p.eager_bytes", "p2p.completion")


def by_name(report: ProbeReport) -> dict[str, FactReport]:
    return {fact.fact: fact for fact in report.facts}


def measured(report: ProbeReport) -> dict[str, Any]:
    """The measured values, or the reasons why there is none."""
    return {
        fact.fact: fact.reason if fact.measured is None else fact.measured for fact in report.facts
    }


@pytest.fixture(scope="module")
def gloo() -> ProbeReport:
    return probe("gloo")


def test_the_declaration_of_gloo_is_confirmed(gloo: ProbeReport) -> None:
    assert gloo.with_verdict(Verdict.OVER_CLAIMED) == ()
    p2p = [fact for fact in gloo.facts if fact.fact.startswith("p2p.")]
    assert [fact for fact in p2p if fact.verdict is not Verdict.CORRECT] == []
    assert len(p2p) == len(OperationSemantics.__struct_fields__)
    assert gloo.certifiable


def test_only_the_graph_capture_cannot_be_measured_on_gloo(gloo: ProbeReport) -> None:
    unmeasured = gloo.with_verdict(Verdict.NOT_MEASURED)
    assert [fact.fact for fact in unmeasured] == ["capture"]
    assert "graph" in unmeasured[0].reason


def test_every_measured_fact_has_evidence(gloo: ProbeReport) -> None:
    for fact in gloo.facts:
        if fact.measured is not None:
            assert fact.evidence
            assert fact.repetitions > 0


def test_collectives_of_gloo_obey_other_rules_than_its_sends(gloo: ProbeReport) -> None:
    facts = measured(gloo)
    names = ("poll", "wait_repeatable", "timeout", "dropped_work")
    assert [facts[f"p2p.{name}"] for name in names] == [
        "never_before_wait",
        False,
        "destructive",
        "loses_message",
    ]
    assert [facts[f"collective.{name}"] for name in names] == ["exact", True, "safe", "continues"]


def test_an_over_claim_is_reported_and_refuses_certification() -> None:
    facts = (*HARMLESS, "p2p.dropped_work", "p2p.size_mismatch", "p2p.peer_loss")
    report = probe(claims.Boastful(), facts=facts, patience=0.5)
    over = {fact.fact for fact in report.with_verdict(Verdict.OVER_CLAIMED)}
    assert over == set(facts) - {"p2p.completion"}
    assert by_name(report)["p2p.completion"].verdict is Verdict.CORRECT
    assert not report.certifiable


def test_an_under_claim_is_reported_and_tells_what_could_be_declared() -> None:
    facts = ("p2p.poll", "p2p.order", "p2p.max_outstanding_per_pair", "p2p.dropped_work", "tags")
    report = probe(claims.Modest(), facts=(*facts, "threads", "p2p.wait_repeatable"))
    under = report.with_verdict(Verdict.UNDER_CLAIMED)
    assert {fact.fact for fact in under} == set(facts)
    assert by_name(report)["p2p.order"].measured == "per_tag"
    assert by_name(report)["p2p.wait_repeatable"].verdict is Verdict.CORRECT
    assert by_name(report)["threads"].verdict is Verdict.NOT_MEASURED
    assert report.certifiable


def test_a_transport_of_one_thread_is_measured_from_one_thread() -> None:
    report = probe(
        claims.Funneled(), facts=["p2p.wait_repeatable", "p2p.wait_blocks"], patience=0.3
    )
    assert measured(report) == {"p2p.wait_repeatable": False, "p2p.wait_blocks": "host"}


def test_a_poll_that_says_yes_at_once_is_early() -> None:
    report = probe(claims.Early(), facts=["p2p.poll"], patience=0.5)
    assert measured(report) == {"p2p.poll": "may_be_early"}
    assert report.facts[0].verdict is Verdict.OVER_CLAIMED


def test_a_poll_that_waits_inside_blocks() -> None:
    report = probe(claims.Blocking(), facts=["p2p.poll"], patience=0.5)
    assert measured(report) == {"p2p.poll": "blocks"}


def test_the_eager_threshold_is_found_to_the_byte() -> None:
    facts = ["p2p.eager_bytes", "p2p.completion"]
    report = probe(claims.Copying(), facts=facts, patience=0.5)
    assert measured(report) == {"p2p.eager_bytes": 1000, "p2p.completion": "local"}
    assert by_name(report)["p2p.eager_bytes"].verdict is Verdict.UNDER_CLAIMED


def test_tags_that_are_ignored_are_noticed() -> None:
    report = probe(claims.Untagged(), facts=["tags", "p2p.order"], patience=0.5)
    assert measured(report) == {"tags": False, "p2p.order": "per_tag"}
    assert by_name(report)["tags"].verdict is Verdict.OVER_CLAIMED


def test_messages_that_overtake_each_other_are_noticed() -> None:
    report = probe(
        claims.Overtaking(), facts=["p2p.order", "p2p.max_outstanding_per_pair"], patience=0.5
    )
    assert measured(report) == {"p2p.order": "unordered", "p2p.max_outstanding_per_pair": 1}


def test_the_draft_for_a_bare_c10d_backend_is_what_the_plugin_declares() -> None:
    report = probe_c10d("gloo")
    draft = eval(report.draft(), vars(semantics))
    assert isinstance(draft, Semantics)
    assert draft.p2p == SEMANTICS.p2p
    assert (draft.progress, draft.tags, draft.devices) == (
        SEMANTICS.progress,
        SEMANTICS.tags,
        SEMANTICS.devices,
    )
    assert draft.collective.poll is SEMANTICS.collective.poll
    assert {fact.verdict for fact in report.facts} <= {Verdict.UNDECLARED, Verdict.NOT_MEASURED}


def test_a_backend_without_collectives_of_torch_says_so() -> None:
    report = probe(claims.Modest(), facts=["collective.poll"], patience=0.5)
    assert report.facts[0].verdict is Verdict.NOT_MEASURED
    assert "c10d" in report.facts[0].reason


def test_a_transport_that_does_not_open_says_why_nothing_was_measured() -> None:
    report = probe(claims.Broken(), facts=["p2p", "threads", "progress", "devices"], patience=0.2)
    assert {fact.verdict for fact in report.facts} == {Verdict.NOT_MEASURED}
    assert "the cable is missing" in by_name(report)["p2p.poll"].reason
    assert report.certifiable


def test_an_unknown_fact_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"'p2p.pol'.*'p2p.poll'"):
        probe("gloo", facts=["p2p.pol"])


def test_an_unknown_c10d_backend_is_refused() -> None:
    with pytest.raises(CommError, match="nowhere") as raised:
        probe_c10d("nowhere")
    assert raised.value.kind is ErrorKind.UNSUPPORTED


def test_a_backend_that_cannot_travel_to_other_processes_is_refused() -> None:
    with pytest.raises(CommError, match="handed to other processes"):
        probe(claims.Untransportable(), facts=["p2p.poll"])


def test_a_backend_that_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from commlayer.backend import Viability

    monkeypatch.setattr(
        GlooBackend, "viability", lambda self: Viability(False, "no network today", "buy one")
    )
    with pytest.raises(CommError, match="no network today"):
        probe(GlooBackend())
