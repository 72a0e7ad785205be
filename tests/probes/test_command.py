"""``commlayer probe``."""

from __future__ import annotations

import json

import commlayer_testkit.conformance.probes.run
import pytest
from typer.testing import CliRunner

from commlayer.cli import build
from commlayer.registry import Registry


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(build(), ["probe", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_table_has_the_facts_that_were_asked_for() -> None:
    code, output, _ = run("gloo", "--facts", "p2p.wait_blocks,tags", "--patience", "0.5")
    assert code == 0
    assert "2 correct" in output
    assert "wait_blocks" in output
    assert "sent later" in output
    assert "dropped_work" not in output


def test_json_carries_evidence_and_the_draft() -> None:
    code, output, _ = run("--c10d", "gloo", "--facts", "p2p.wait_blocks", "--json")
    report = json.loads(output)
    assert code == 0
    assert report["facts"][0]["measured"] == "host"
    assert report["facts"][0]["evidence"]
    assert report["certifiable"] is True
    assert "wait_blocks=WaitBlocks.HOST" in report["draft"]


def test_an_over_claim_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import claims

    registry = Registry()
    registry.add_backend(claims.Boastful())
    monkeypatch.setattr(
        commlayer_testkit.conformance.probes.run, "default_registry", lambda: registry
    )
    code, output, _ = run("boastful", "--facts", "p2p.wait_repeatable", "--patience", "0.5")
    assert code == 1
    assert "over-claimed" in output


def test_one_subject_is_wanted() -> None:
    assert run()[0] == 2
    assert run("gloo", "--c10d", "gloo")[0] == 2


def test_an_unknown_fact_is_a_usage_error() -> None:
    code, _, error = run("gloo", "--facts", "p2p.pol")
    assert code == 2
    assert "p2p.poll" in error


def test_a_c10d_backend_that_a_module_registers_is_measured_in_the_ranks() -> None:
    code, output, _ = run("--c10d", "claims:renamed_gloo", "--facts", "p2p.wait_blocks", "--json")
    assert json.loads(output)["facts"][0]["measured"] == "host"
    assert code == 0


def test_nothing_measured_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    import claims

    registry = Registry()
    registry.add_backend(claims.Broken())
    monkeypatch.setattr(
        commlayer_testkit.conformance.probes.run, "default_registry", lambda: registry
    )
    code, _, error = run("broken", "--facts", "p2p.poll", "--patience", "0.2")
    assert code == 1
    assert "nothing was measured" in error
