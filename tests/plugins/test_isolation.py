"""A broken third-party plugin disturbs nobody, seen from fresh processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(site):
    """Run Python with the site and the sources of the project on its path."""

    def run(*arguments: str) -> str:
        path = [site.path, ROOT, *ROOT.glob("plugins/*")]
        process = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
            cwd=site.path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert process.returncode == 0, process.stderr
        return process.stdout

    return run


@pytest.fixture
def crowd(site):
    """Every way of being broken, side by side, and one healthy plugin."""
    site.install("acme-good", site.plugin("good"), "good")
    site.install("acme-import", "import absent_dependency", "import")
    site.install("acme-exit", "raise SystemExit(9)", "exit")
    site.install("acme-hook", "", "hook")
    site.install("acme-future", site.plugin("future", plugin_api=(7, 7)), "future")
    site.install("acme-one", site.plugin("same"), "same")
    site.install("acme-two", site.plugin("same"), "same")
    site.install("acme-raise", site.plugin("raise", viability="raise OSError('gone')"), "raise")


@pytest.mark.usefixtures("crowd")
def test_backends_lists_the_healthy_one_and_the_reason_of_each_broken_one(run):
    listed = {e["name"]: e for e in json.loads(run("-m", "commlayer.cli", "backends", "--json"))}
    assert listed["good"]["viable"] is True
    reasons = {
        "import": "absent_dependency",
        "exit": "SystemExit: 9",
        "hook": "no hook implementation",
        "future": "plugin API 7",
        "same": "acme-one 1.0 and acme-two 1.0",
        "raise": "OSError: gone",
    }
    for name, reason in reasons.items():
        assert listed[name]["viable"] is False
        assert reason in listed[name]["reason"]


@pytest.mark.usefixtures("crowd")
def test_selecting_by_name_imports_no_broken_plugin(run):
    code = (
        "import sys; from commlayer.registry import default_registry\n"
        "print(default_registry().select('good').origin)\n"
        "print(sorted(name for name in sys.modules if name.startswith('acme')))"
    )
    assert run("-c", code).splitlines() == ["acme-good 1.0", "['acme_good']"]


@pytest.mark.usefixtures("crowd")
def test_the_gloo_plugin_is_selected_beside_broken_ones(site, run):
    site.metadata("commlayer-gloo", "[commlayer.backends]\ngloo = commlayer_gloo\n")
    code = (
        "import sys; from commlayer.registry import default_registry\n"
        "loaded = default_registry().select('gloo')\n"
        "print(loaded.backend.name, loaded.distribution)\n"
        "print([name for name in sys.modules if name.startswith('acme')])"
    )
    assert run("-c", code).splitlines() == ["gloo commlayer-gloo", "[]"]
