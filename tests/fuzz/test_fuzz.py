"""The fuzz target runs, briefly; ``make fuzz`` runs it for longer."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


def test_damaged_messages_are_refused_or_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    target = runpy.run_path(str(Path(__file__).with_name("run.py")))
    target["main"](10_000, seed=1)
    assert "10,000 inputs" in capsys.readouterr().out
