"""How the library is built: no circles, no name for two things, and bytes apart from threads."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import grimp
import pytest

import commlayer

ROOT = Path(commlayer.__file__).parent


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other: strongly connected components, by Tarjan."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in imports.get(name, ()):
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            group = [stack.pop()]
            while group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports:
        if name not in order:
            visit(name)
    return found


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """What each module of the library imports, for types included."""
    graph = grimp.build_graph("commlayer", exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]


def test_no_two_modules_need_each_other(imports: dict[str, set[str]]) -> None:
    assert len(imports) > 50
    assert circles(imports) == []


def test_the_wire_knows_no_thread_lane_or_ledger(imports: dict[str, set[str]]) -> None:
    above = {
        f"{module} imports {other}"
        for module, others in imports.items()
        if module.startswith("commlayer.wire")
        for other in others
        if not other.startswith(("commlayer.wire", "commlayer.errors", "commlayer.config"))
    }
    assert above == set()


def test_no_class_has_the_name_of_another() -> None:
    places = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 450} == {}
