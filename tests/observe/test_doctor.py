"""`commlayer doctor`: alone, with processes of its own, and among the ranks of a job."""

from __future__ import annotations

import json
import os
from typing import Any

import msgspec
import pytest
from commlayer_tools.doctor import agreement, machine, selftest
from commlayer_tools.doctor.agreement import Credentials, compare
from commlayer_tools.doctor.checks import Check, Diagnosis
from ranks import here
from ranks.pool import Ranks
from typer.testing import CliRunner, Result

from commlayer.cli import build
from commlayer.registry import Registry, default_registry


def invoke(*arguments: str, **environment: str) -> Result:
    clean = {k: None for k in os.environ if k.startswith("COMMLAYER_")}
    return CliRunner().invoke(build(), ["doctor", *arguments], env={**clean, **environment})


def run(*arguments: str, **environment: str) -> tuple[int, dict[str, Any]]:
    result = invoke("--quick", "--json", *arguments, **environment)
    return result.exit_code, json.loads(result.stdout)


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [each for each in report["checks"] if each["name"] == name]
    return dict(found)


def test_quick_looks_and_starts_nothing() -> None:
    code, report = run()
    assert code == 0
    assert report["ok"]
    assert set(report["facts"]) == {
        "commlayer", "system", "torch", "devices", "backends", "interfaces", "environment",
    }  # fmt: skip
    loopback = next(i for i in report["facts"]["interfaces"] if i["name"] == "lo")
    assert "127.0.0.1" in loopback["addresses"]
    assert check(report, "backend in use")["status"] == "ok"
    assert not [c for c in report["checks"] if c["name"].startswith("self-test")]


def test_a_wrong_setting_fails_with_its_cure() -> None:
    code, report = run(COMMLAYER_CHANELS="kv")
    assert code == 1
    assert not report["ok"]
    configuration = check(report, "configuration")
    assert configuration["status"] == "failed"
    assert "COMMLAYER_CHANNELS" in configuration["cure"]


def test_settings_that_differ_from_the_default_are_listed() -> None:
    code, report = run(COMMLAYER_STALL_TIMEOUT="5")
    assert code == 0
    assert check(report, "configuration")["found"] == "stall_timeout = 5.0"
    assert report["facts"]["environment"]["COMMLAYER_STALL_TIMEOUT"] == "5"


def test_a_backend_that_is_not_there_fails() -> None:
    code, report = run(COMMLAYER_BACKEND="glo")
    assert code == 1
    assert "Did you mean 'gloo'?" in check(report, "backend in use")["cure"]


def test_two_processes_talk_over_the_backend() -> None:
    backend = default_registry().load("gloo").backend
    made = selftest.run(backend, 0.2)
    assert made.status == "ok", made
    assert "MiB/s" in made.found


def test_a_self_test_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    made = selftest.run(default_registry().load("gloo").backend, 0.2)
    assert made.status == "failed"
    assert "nosuch0" in made.found


def differ(key: str, values: list[str]) -> tuple[int, list[Check]]:
    os.environ[key] = values[here.rank()]
    return agreement.examine(default_registry(), 0.2)


def test_ranks_that_agree_talk(ranks: Ranks) -> None:
    results = ranks.run(differ, 3, "COMMLAYER_TRACE_DIR", [""] * 3, timeout=60)
    for rank, (own, checks) in enumerate(results):
        assert own == rank
        assert [c.name for c in checks] == ["ranks agree", "ranks talk"]
        assert all(c.status == "ok" for c in checks), checks
    assert "rank 0 with rank 1" in results[0][1][1].found
    assert "rank 2 with" not in results[2][1][1].found


def test_ranks_that_differ_in_what_must_agree(ranks: Ranks) -> None:
    """Found by every rank, naming both, and nothing is connected."""
    for _, checks in ranks.run(differ, 2, "COMMLAYER_INLINE_BYTES", ["1024", "2048"]):
        assert [c.status for c in checks] == ["failed"]
        assert checks[0].name == "ranks agree on config inline_bytes"
        assert "rank 0 (pid" in checks[0].found
        assert "has 1024" in checks[0].found
        assert "has 2048" in checks[0].found


def test_ranks_that_differ_in_what_had_better_agree(ranks: Ranks) -> None:
    for _, checks in ranks.run(differ, 2, "COMMLAYER_STALL_TIMEOUT", ["5", "6"]):
        assert [c.status for c in checks] == ["warning", "ok"]
        assert checks[0].name == "ranks agree on config stall_timeout"


def credentials(**changes: Any) -> Credentials:
    mine = agreement.own(default_registry())
    return msgspec.structs.replace(mine, **changes)


def test_facts_are_compared_one_by_one() -> None:
    mine = credentials()
    theirs = credentials(must={**mine.must, "fact p2p.poll": "exact"})
    (found,) = compare([mine, mine, theirs])
    assert found.name == "ranks agree on fact p2p.poll"
    assert "rank 2" in found.found


def test_a_rank_without_a_backend_is_named() -> None:
    lost = agreement.own(Registry(entry_points=[]))
    (found,) = compare([credentials(), lost])
    assert found.status == "failed"
    assert found.found.startswith("rank 1 (pid")


def test_the_verdict_ignores_warnings() -> None:
    assert Diagnosis({}, (Check("x", "warning", "y"), Check("x", "absent", "y"))).ok
    assert not Diagnosis({}, (Check("x", "failed", "y"),)).ok


def test_words_for_people() -> None:
    said = invoke("--quick")
    assert said.exit_code == 0, said.output
    assert "ok    backend in use:" in said.stdout
    assert said.stdout.rstrip().splitlines()[-1].startswith("0 failed, ")


def test_interfaces_have_both_families() -> None:
    families = {":" in a for i in machine.interfaces() for a in i["addresses"]}
    assert False in families
