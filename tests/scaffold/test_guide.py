"""What the backend author's guide shows works, and its counts are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commlayer_testkit.conformance import Lab, Level, Outcome, Rule, Subject, all_rules, judge
from commlayer_testkit.conformance.deviations import DeviationKind, load
from commlayer_testkit.scaffold import render
from lines import code_lines

from commlayer.backend import Backend
from commlayer.errors import CommError
from commlayer.semantics import OperationSemantics, Semantics

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "backend-author-guide.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)


def played(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, "guide", "exec"), names)
    return names


def test_the_backend_has_the_right_shape_and_is_refused_by_its_facts() -> None:
    backend: Backend = played(blocks("python")[0])["commlayer_backend"]()
    with Lab(Subject(backend)) as lab:
        verdicts = {rule.id: judge(rule, lab) for rule in all_rules(Level.L0)}
    failed = [name for name, verdict in verdicts.items() if verdict.outcome is Outcome.FAILED]
    assert failed == ["L0-core-accepts"]
    assert "tags = False" in verdicts[failed[0]].message
    with pytest.raises(CommError, match="there are none"):
        backend.open(None, {"a": 1})  # type: ignore[arg-type]


def test_the_rule_judges() -> None:
    (rule,) = played(blocks("python")[1])["commlayer_conformance_rules"](Semantics())
    assert isinstance(rule, Rule)
    with Lab(Subject("gloo")) as lab:
        assert judge(rule, lab).outcome is Outcome.FAILED


def test_the_deviations_load(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    (tmp_path / "deviations.toml").write_text(text)
    (deviation,) = load(tmp_path / "deviations.toml").values()
    assert deviation.kind is DeviationKind.NOT_YET


def test_every_fact_has_its_question() -> None:
    facts = {*OperationSemantics.__struct_fields__, *Semantics.__struct_fields__}
    asked = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*", GUIDE, flags=re.MULTILINE))))
    assert facts - {"p2p", "collective"} - asked == set()


def counts(plugin: Path) -> tuple[int, int, int]:
    sources = [file.read_text() for file in plugin.glob("commlayer_*/*.py")]
    pyproject = (plugin / "pyproject.toml").read_text().splitlines()
    return (
        sum(map(code_lines, sources)),
        sum(len(source.splitlines()) for source in sources),
        sum(bool(line.strip()) for line in pyproject),
    )


@pytest.mark.parametrize("plugin", ["gloo", "nccl", "npu", "oneccl", "mpi"])
def test_the_counts_of_a_real_plugin_are_about_right(plugin: str) -> None:
    found = counts(ROOT / "plugins" / f"commlayer-{plugin}")
    assert written()[plugin] == pytest.approx(found, rel=0.1, abs=1)


def test_the_counts_of_the_rendered_plugin(tmp_path: Path) -> None:
    assert written()["`commlayer new-plugin`"] == counts(render("my_fabric", tmp_path))


def written() -> dict[str, tuple[int, ...]]:
    rows = re.findall(r"^\| (\S+|`\S+ \S+`) \| (\d+) \| (\d+) \| (\d+) \|", GUIDE, re.MULTILINE)
    return {name: tuple(map(int, numbers)) for name, *numbers in rows}


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", GUIDE))
def test_the_linked_pages_exist(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
