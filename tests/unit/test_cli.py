"""The command line: discovery of commands, reports, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import commlayer.cli
import commlayer.registry
from commlayer.backend import PLUGIN_API, Backend, Viability
from commlayer.config import CommConfig
from commlayer.registry import Registry
from commlayer.semantics import Completion, OperationSemantics, Poll, Progress, Semantics

DISTRIBUTIONS = {"commlayer-bench", "commlayer-demo", "commlayer-testkit", "commlayer-tools"}


class Example(Backend):
    name = "example"
    plugin_api = (PLUGIN_API, PLUGIN_API + 1)
    priority = 7
    sources = {"p2p.poll": "tests/probe.py:1", "progress": "tests/probe.py:2"}  # noqa: RUF012
    semantics = Semantics(
        p2p=OperationSemantics(poll=Poll.NEVER_BEFORE_WAIT, completion=Completion.MATCHED),
        collective=OperationSemantics(poll=Poll.EXACT, completion=Completion.MATCHED),
        progress=Progress.AUTONOMOUS,
    )

    def viability(self):
        return Viability(False, "no [red]card[/red]", "fit one")

    def open(self, world, options):
        raise NotImplementedError

    def versions(self):
        return {"driver": "1.2"}


@pytest.fixture
def registry(monkeypatch):
    registry = Registry(entry_points=[])
    monkeypatch.setattr(commlayer.registry, "default_registry", lambda: registry)
    return registry


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(commlayer.cli.build(), arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    return run


def main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["commlayer", *arguments])
    with pytest.raises(SystemExit) as caught:
        commlayer.cli.main()
    return int(caught.value.code or 0)


def test_help_lists_the_commands(run):
    listed = run("--help")
    assert all(command in listed for command in ("backends", "describe", "config"))


def test_help_loads_nothing_slow():
    code = (
        "import sys, commlayer; before = set(sys.modules); sys.argv = ['commlayer', '--help']\n"
        "from commlayer.cli import main\n"
        "try: main()\n"
        "finally: print({'torch', 'numpy'} & (set(sys.modules) - before), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )
    assert process.returncode == 0
    assert process.stderr.strip() == "set()"


def test_version_names_the_plugin_interface(run):
    assert f"plugin API {PLUGIN_API}" in run("--version")


def test_a_distribution_adds_its_command_by_an_entry_point(run, tmp_path, monkeypatch):
    (tmp_path / "acme_greeting.py").write_text(
        "def register(app):\n    @app.command()\n    def greet(): print('hello')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("greet", "acme_greeting", "commlayer.commands")
    monkeypatch.setattr(commlayer.cli.importlib.metadata, "entry_points", lambda group: [point])
    assert run("greet") == "hello\n"


def test_backends_as_table_and_json(run, registry):
    registry.add_backend(Example())
    table = run("backends")
    assert all(text in table for text in ("example", "this process", "[red]card[/red]", "fit one"))
    (listed,) = json.loads(run("backends", "--json"))
    assert listed == {
        "name": "example",
        "distribution": "this process",
        "version": "",
        "plugin_api": [PLUGIN_API, PLUGIN_API + 1],
        "priority": 7,
        "viable": False,
        "reason": "no [red]card[/red]",
        "install": "fit one",
    }


@pytest.mark.usefixtures("registry")
def test_backends_without_any_says_how_to_install_one(run):
    assert "pip install" in run("backends")
    assert json.loads(run("backends", "--json")) == []


def test_describe_as_json(run, registry):
    registry.add_backend(Example())
    report = json.loads(run("describe", "example", "--json"))
    assert report["facts"] == json.loads(json.dumps(Example.semantics.facts()))
    assert report["versions"] == {"driver": "1.2"}
    assert report["sources"] == Example.sources
    assert (report["viable"], report["reason"], report["install"]) == (
        False,
        "no [red]card[/red]",
        "fit one",
    )


def test_describe_shows_every_fact_with_meaning_and_source(run, registry):
    registry.add_backend(Example())
    text = run("describe", "example")
    for fact in (*OperationSemantics.__struct_fields__, *Semantics.__struct_fields__[2:]):
        assert fact in text
    assert "p2p: It says no until somebody waits." in text
    assert "collective: It says yes if and only if the operation is complete." in text
    assert "The peer has posted the receive." in text
    assert "p2p source: tests/probe.py:1" in text
    assert "source: tests/probe.py:2" in text
    assert "driver: 1.2" in text


def test_config_shows_what_is_in_effect_and_from_where(run, monkeypatch, tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("peer_timeout = 9.0\nname = 'file'\n")
    monkeypatch.setenv("COMMLAYER_CONFIG", str(path))
    monkeypatch.setenv("COMMLAYER_NAME", "environment")
    rows = {row["key"]: row for row in json.loads(run("config", "--effective", "--json"))}
    assert set(rows) == {field.name for field in msgspec.structs.fields(CommConfig)}
    assert rows["peer_timeout"] == {"key": "peer_timeout", "value": 9.0, "from": f"file {path}"}
    assert rows["name"] == {"key": "name", "value": "environment", "from": "COMMLAYER_NAME"}
    assert rows["backend"]["from"] == "default"
    assert "COMMLAYER_NAME" in run("config", "--effective")


def test_the_version_is_that_of_the_distribution(run):
    assert commlayer.__version__ == version("commlayer")
    assert commlayer.__version__ in run("--version")


def test_config_shows_every_key(run):
    rows = {row["key"]: row for row in json.loads(run("config", "--json"))}
    assert set(rows) == set(CommConfig.__struct_fields__)
    assert rows["connect_timeout"]["variable"] == "COMMLAYER_CONNECT_TIMEOUT"
    assert rows["connect_timeout"]["default"] == CommConfig().connect_timeout
    assert rows["connect_timeout"]["unit"] == "seconds"
    assert rows["on_full"]["type"] == "`wait` or `raise`"
    assert all(row["meaning"] and row["type"] for row in rows.values())
    table, markdown = run("config"), run("config", "--markdown")
    for key in rows:
        assert key in table
        assert f"| `{key}` |" in markdown


@pytest.mark.usefixtures("registry")
def test_comm_error_is_one_line_on_stderr_and_exit_code_1(monkeypatch, capsys):
    assert main(monkeypatch, "describe", "absent") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("commlayer: select backend 'absent'")
    assert captured.err.count("\n") == 1


def test_wrong_usage_is_exit_code_2(monkeypatch):
    assert main(monkeypatch, "nonsense") == 2


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_says_what_to_install(monkeypatch, capsys, missing):
    real = commlayer.cli.build

    def build():
        if missing == "typer":
            monkeypatch.setitem(sys.modules, "typer", None)
            return real()
        raise ModuleNotFoundError("No module named 'rich'", name="rich")

    monkeypatch.setattr(commlayer.cli, "build", build)
    assert main(monkeypatch, "backends") == 2
    assert "pip install 'commlayer[cli]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "distribution"), [("bench", "commlayer-bench"), ("doctor", "commlayer-tools")]
)
def test_a_command_of_a_distribution_that_is_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, command: str, distribution: str
) -> None:
    monkeypatch.setattr(commlayer.cli.importlib.metadata, "entry_points", lambda group: [])
    result = CliRunner().invoke(commlayer.cli.build(), [command, "--quick"])
    assert result.exit_code == 2
    assert f"pip install {distribution}" in result.output


def test_every_command_of_this_project_is_known_with_its_distribution() -> None:
    points = [p for p in entry_points(group=commlayer.cli.GROUP) if p.dist.name in DISTRIBUTIONS]
    assert {point.name: point.dist.name for point in points} == commlayer.cli._AT


@pytest.mark.parametrize("source", ["raise OSError('no')", ""])
def test_a_command_that_cannot_be_added_disturbs_no_other(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    source: str,
) -> None:
    (tmp_path / "acme_broken.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_broken", raising=False)
    points = [
        EntryPoint("broken", "acme_broken", "commlayer.commands"),
        EntryPoint("describe", "commlayer_tools.commands.describe", "commlayer.commands"),
    ]
    monkeypatch.setattr(commlayer.cli.importlib.metadata, "entry_points", lambda group: points)
    result = CliRunner().invoke(commlayer.cli.build(), ["--help"])
    assert result.exit_code == 0
    assert "every declared fact" in result.output
    assert "'broken'" in capsys.readouterr().err
