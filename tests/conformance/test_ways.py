"""The three ways to run the kit collect, and judge, the same rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commlayer_testkit.conformance import Level, all_rules
from commlayer_testkit.conformance.report import decode

ROOT = Path(__file__).resolve().parents[2]
VENDOR = """
from commlayer_testkit.conformance import BackendConformance

class TestMine(BackendConformance):
    backend = "gloo"
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run pytest or the command line in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=100,
    )


def collected(output: str) -> list[str]:
    return [line.split("[")[1].rstrip("]") for line in output.splitlines() if "test_rule[" in line]


def test_all_collect_the_same_rules(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(VENDOR)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    wanted = [rule.id for rule in all_rules(Level.L2)]
    own = run(tmp_path, "pytest", "--collect-only", "-q")
    assert collected(own.stdout) == wanted, own.stdout + own.stderr
    package = run(
        tmp_path, "pytest", "--collect-only", "-q", "--pyargs",
        "commlayer_testkit.conformance",
        "--commlayer-backend=gloo",
    )  # fmt: skip
    assert collected(package.stdout) == wanted, package.stdout + package.stderr


def test_the_package_collects_nothing_unless_asked(tmp_path: Path) -> None:
    found = run(tmp_path, "pytest", "-q", "--pyargs", "commlayer_testkit.conformance")
    assert "passed" not in found.stdout
    assert "failed" not in found.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the files of one run of the command at L0."""
    folder = tmp_path_factory.mktemp("command")
    found = run(
        folder, "commlayer.cli", "conformance", "gloo", "--level", "L0",
        "--json", "a.json",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "level reached: L0 of L0 asked (simulated only" in found.stdout
    return folder


def test_pytest_and_command_write_the_same_verdicts(written: Path, tmp_path: Path) -> None:
    found = run(
        tmp_path, "pytest", "-q", "-p", "no:cacheprovider", "--pyargs",
        "commlayer_testkit.conformance",
        "--commlayer-backend=gloo", "--commlayer-level=L0", "--commlayer-report=b.json",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    one, two = (decode(file.read_bytes()) for file in (written / "a.json", tmp_path / "b.json"))
    assert [(v.rule, v.outcome) for v in one.verdicts] == [
        (v.rule, v.outcome) for v in two.verdicts
    ]
    assert (two.level, two.errors) == (Level.L0, {})
    compared = run(
        tmp_path, "commlayer.cli", "conformance", "compare", str(written / "a.json"), "b.json"
    )
    assert (compared.returncode, compared.stdout) == (0, "no difference\n")


def test_a_stale_deviation_fails_command_and_pytest(written: Path, tmp_path: Path) -> None:
    (tmp_path / "known.toml").write_text(
        '[[deviation]]\nrule = "L0-named"\nkind = "never"\nreason = "r"\nissue = "i"\n'
    )
    command = run(
        tmp_path, "commlayer.cli", "conformance", "gloo", "--level", "L0",
        "--deviations", "known.toml", "--json", "c.json",
    )  # fmt: skip
    assert command.returncode == 1
    assert "error L0-named: a deviation says that it fails (r), and it passes" in command.stdout
    (tmp_path / "test_mine.py").write_text(
        VENDOR + '    level = "L0"\n    deviations = "known.toml"\n'
    )
    vendor = run(tmp_path, "pytest", "-q", "-p", "no:cacheprovider")
    assert vendor.returncode == 1
    assert "it passes" in vendor.stdout
    lost = run(
        tmp_path, "commlayer.cli", "conformance", "compare", str(written / "a.json"), "c.json"
    )
    assert lost.returncode == 1
    assert "lost: level reached" in lost.stdout


def test_json_is_json(written: Path) -> None:
    found = json.loads((written / "a.json").read_text())
    assert found["schema"] == "commlayer-conformance/1"


@pytest.mark.parametrize(
    "arguments", [("nothing",), ("gloo", "--level", "L9"), ("compare", "x.json"), ()]
)
def test_wrong_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    found = run(tmp_path, "commlayer.cli", "conformance", *arguments)
    assert found.returncode in (1, 2)
    assert "Traceback" not in found.stderr
