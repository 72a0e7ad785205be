"""``commlayer sim``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commlayer_testkit.sim import all_scenarios
from typer.testing import CliRunner

from commlayer.cli import build
from commlayer.errors import CommError


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(), ["sim", *arguments])
    if isinstance(result.exception, CommError):
        raise result.exception
    return result.exit_code, result.output


def test_list_names_every_scenario_and_profile() -> None:
    code, output = invoke("list", "--json")
    assert code == 0
    listed = json.loads(output)
    assert {s["name"] for s in listed["scenarios"]} == set(all_scenarios())
    assert listed["profiles"]["gloo"]["p2p"]["poll"] == "never_before_wait"
    assert all(s["doc"] for s in listed["scenarios"])
    assert invoke("list")[0] == 0


def test_explore_prints_cycle_and_replay_and_replay_repeats_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, output = invoke("explore", "late_device_receive", "--trace", str(trace))
    assert code == 0
    assert "deadlock" in output
    assert "cycle:" in output
    assert json.loads(trace.read_text())["traceEvents"]
    string = output.split("replay: ")[1].split()[0]
    code, again = invoke("replay", string)
    assert code == 0
    assert "late device receive of rank 1" in again


def test_explore_json() -> None:
    code, output = invoke(
        "explore", "exchange_two", "--strategy", "random", "--budget", "20", "--seed", "5", "--json"
    )
    assert code == 0
    report = json.loads(output)
    assert report["schedules"] == 20
    assert report["failure"] is None
    assert not report["exhausted"]
    assert report["as_expected"]
    assert report["schedules_per_second"] > 0


def test_an_unexpected_end_is_exit_code_1() -> None:
    assert invoke("explore", "exchange_two", "--profile", "oneccl_cpu")[0] == 1
    assert invoke("replay", "exchange_one@gloo:-", "--json")[0] == 1


def test_scenarios_of_another_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scenarios.py").write_text(
        "from commlayer_testkit.sim import scenario\n"
        "@scenario('gloo')\n"
        "def own(world):\n"
        "    'Nothing happens.'\n"
        "    world.start(1, lambda rank: None)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, output = invoke("explore", "own", "--module", "own_scenarios")
    assert code == 0
    assert "exhausted" in output


def test_bad_names_are_explained() -> None:
    with pytest.raises(CommError, match="no such scenario"):
        invoke("explore", "nobody")
    with pytest.raises(CommError, match="module"):
        invoke("list", "--module", "no_such_module_here")
