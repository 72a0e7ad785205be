"""What `commlayer new-plugin` renders installs, and is certified at L1 as it is, in three ways."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from commlayer_testkit.conformance import Level, Outcome, all_rules
from commlayer_testkit.conformance.deviations import load
from commlayer_testkit.conformance.report import Certificate, decode
from commlayer_testkit.scaffold import render
from lines import code_lines

from commlayer.errors import CommError

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 6
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render("my_fabric", tmp_path_factory.mktemp("vendor"))


@pytest.fixture(scope="module")
def run(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a module in the repository, with the plugin installed in an environment of its own.

    The environment sees the packages of this one, and needs no package index.
    """
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60
    )
    python = environment / "bin" / "python"
    packages = Path(
        sysconfig.get_path("purelib", vars={"base": str(environment)}, scheme="posix_prefix")
    )
    parents = [*site.getsitepackages(), str(ROOT)]
    (packages / "parents.pth").write_text(
        "".join(f"import site; site.addsitedir({parent!r})\n" for parent in parents)
    )
    install(repository, packages)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), "-m", *command],
            cwd=repository,
            env=os.environ | {"COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=110,
        )

    return run


def install(repository: Path, packages: Path) -> None:
    """Build the wheel with the backend that pyproject names, and unpack it, as installers do."""
    wheels = packages.parent / "wheels"
    wheels.mkdir()
    build = f"from hatchling.build import build_wheel; build_wheel({str(wheels)!r})"
    built = subprocess.run(
        [sys.executable, "-c", build], cwd=repository, capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(packages)


def assert_certified(certificate: Certificate) -> None:
    assert (certificate.backend, certificate.level) == ("my_fabric", Level.L1)
    assert (certificate.errors, certificate.deviations) == ({}, ())
    assert [v.rule for v in certificate.verdicts] == [rule.id for rule in all_rules(Level.L1)]
    assert certificate.versions["commlayer-my-fabric"] == "0.1.0"


@pytest.mark.parametrize(
    ("file", "limit"),
    [
        ("commlayer_my_fabric/__init__.py", 60),
        ("tests/test_conformance.py", 3),
    ],
)
def test_lines_of_code(repository: Path, file: str, limit: int) -> None:
    assert code_lines((repository / file).read_text()) <= limit


def test_lines_of_pyproject(repository: Path) -> None:
    lines = (repository / "pyproject.toml").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 12


def test_nothing_is_left_to_fill_in(repository: Path) -> None:
    for file in repository.rglob("*"):
        assert file.is_dir() or "%{" not in file.read_text(), file


def test_the_deviation_of_its_readme_loads(repository: Path, tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    (tmp_path / "deviations.toml").write_text(text)
    assert load(tmp_path / "deviations.toml")


def test_it_is_found_by_name(run: Run) -> None:
    found = run("commlayer.cli", "backends")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "my_fabric" in found.stdout
    assert "a toy, which needs nothing" in found.stdout


def test_its_own_three_lines_certify_it(run: Run) -> None:
    found = run(
        "pytest", "-q", "-k", "L0 or L1", f"--commlayer-schedules={SCHEDULES}",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    judged = len(all_rules(Level.L1))
    assert f"{judged - 1} passed, 1 skipped" in found.stdout  # L1-idle: nobody waits inside it


def test_pytest_with_its_name_certifies_it(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "certificate.json"
    found = run(
        "pytest", "-q", "--pyargs",
        "commlayer_testkit.conformance", "--commlayer-backend=my_fabric",
        "--commlayer-level=L1", f"--commlayer-schedules={SCHEDULES}",
        f"--commlayer-report={report}",
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert_certified(decode(report.read_bytes()))


def test_the_command_certifies_it(run: Run, tmp_path: Path) -> None:
    report = tmp_path / "certificate.json"
    found = run(
        "commlayer.cli", "conformance", "my_fabric", "--level", "L1",
        "--schedules", str(SCHEDULES), "--json", str(report),
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert_certified(decode(report.read_bytes()))


@pytest.mark.parametrize("rule", ["L2-order", "L2-native-poll", "L2-values"])
def test_messages_travel_between_processes(run: Run, rule: str) -> None:
    found = run("commlayer.cli", "conformance", "my_fabric", "--rule", rule)
    assert found.returncode == 0, found.stdout + found.stderr
    assert Outcome.PASSED.value in found.stdout


@pytest.mark.parametrize(
    "name", ["", "auto", "My", "my-fabric", "1st", "a__b", "a_", "../x", "gloo"]
)
def test_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CommError, match="new plugin"):
        render(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    folder = render("other", tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(CommError, match="--into"):
        render("other", tmp_path)
    assert (folder / "README.md").read_text() == "mine"
