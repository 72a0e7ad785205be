"""Commands, targets, variables, paths and pages that pages name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from commlayer.cli import build
from commlayer.config import ENVIRONMENT_PREFIX, OF_A_SERVICE, RESERVED_ENVIRONMENT, CommConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
LINK = re.compile(r"\[[^\]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")
GENERATED = {"mutants.md", "specification.md"}
TEXTS = {str(p.relative_to(ROOT)): p.read_text() for p in PAGES if p.name not in GENERATED}
MAKEFILE = (ROOT / "Makefile").read_text()
NOT_COMMANDS = {"direct", "report"}
"""A contender of the benchmark, and the first words of a stall report."""
APP: Any = typer.main.get_command(build())


def code(text: str) -> Iterator[str]:
    """Each line of code blocks, without its comment, and each code span."""
    for block in re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            yield line.partition("#")[0].strip()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose))


def every(pattern: str) -> list[tuple[str, str]]:
    """Each match of `pattern` at the beginning of code, with its page, once."""
    found = {
        (page, match[1])
        for page, text in TEXTS.items()
        for piece in code(text)
        if (match := re.match(pattern, piece))
    }
    return sorted(found)


@pytest.mark.parametrize(("page", "target"), every(r"make ([a-z][a-z-]*)\b"))
def test_a_target_exists(page: str, target: str) -> None:
    assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE)


@pytest.mark.parametrize(("page", "line"), every(r"((?:COMMLAYER_\S+ )?commlayer [a-z-]+.*)$"))
def test_a_command_and_its_options_exist(page: str, line: str) -> None:
    words = re.split(r"[|;&>]", line[line.index("commlayer ") :])[0].split()[1:]
    if words[0] in NOT_COMMANDS:
        return
    command = APP.commands[words.pop(0)]
    if hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= known


def test_variables_exist() -> None:
    known = {field.upper() for field in CommConfig.__struct_fields__} | RESERVED_ENVIRONMENT
    named = {
        name
        for text in TEXTS.values()
        for name in re.findall(rf"\b{ENVIRONMENT_PREFIX}([A-Z_]+[A-Z])\b", text)
        if not OF_A_SERVICE.fullmatch(name)
    }
    assert named <= known


@pytest.mark.parametrize("page", ["docs/how-to/fast.md", "docs/how-to/memory.md"])
def test_defaults_are_those_of_the_configuration(page: str) -> None:
    defaults = CommConfig()
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", TEXTS[page], flags=re.MULTILINE)
    assert rows
    assert {key: int(value) for key, value in rows} == {
        key: getattr(defaults, key) for key, _ in rows
    }


@pytest.mark.parametrize(
    ("page", "path"), every(r"((?:commlayer|docs|plugins|tests)/[a-z0-9_/.-]+)$"), ids=str
)
def test_a_path_exists(page: str, path: str) -> None:
    assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_links_to_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert missing == []


def test_every_decision_is_numbered_once() -> None:
    names = [page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md")]
    assert sorted(int(name[:3]) for name in names) == list(range(1, len(names) + 1))
