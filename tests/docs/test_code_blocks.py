"""Every Python block of README and docs runs as it is shown, or says that it is a fragment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from doc_blocks import ROOT, Block, blocks_of, pages, run, run_as_rank
from ranks.pool import Ranks

PAGES = {str(page.relative_to(ROOT)): blocks_of(page) for page in pages()}
OWN_TESTS = {"README.md"}
"""Pages whose scripts are run, as a reader would run them, by a test of their own."""

SINGLE = [name for name, blocks in PAGES.items() if any(not b.ranks for b in blocks)]
SCRIPTS = [
    block
    for name, blocks in PAGES.items()
    if name not in OWN_TESTS
    for block in blocks
    if block.ranks
]


@pytest.fixture
def _registered_scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios that a page registers are forgotten after it."""
    scenario = importlib.import_module("commlayer_testkit.sim.scenario")
    monkeypatch.setattr(scenario, "_SCENARIOS", scenario.all_scenarios())


@pytest.mark.usefixtures("_registered_scenarios")
@pytest.mark.parametrize("page", SINGLE)
def test_blocks_of_one_process(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "a_page"}
    for block in PAGES[page]:
        if block.fragment:
            block.compiled()
        elif not block.ranks:
            printed = run(block, namespace)
            assert block.prints in (None, printed), f"{page}:{block.line}"


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"{block.page}:{block.line}")
def test_scripts_of_several_ranks(block: Block, ranks: Ranks) -> None:
    printed = ranks.run(run_as_rank, block.ranks, block, timeout=60)
    if block.prints is not None:
        assert "".join(sorted(printed)) == block.prints


def test_blocks_are_found() -> None:
    assert len(SINGLE) > 3
    assert len(SCRIPTS) > 3
