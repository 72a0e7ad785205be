"""Renders the repository of a new backend plugin."""

from __future__ import annotations

import importlib.resources
import re
import string
from pathlib import Path

from commlayer.errors import CommError, ErrorKind
from commlayer.loading import AUTO
from commlayer.registry import default_registry

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_TEMPLATES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    "%{package}/__init__.py": "plugin.py",
    "%{package}/py.typed": None,
    "tests/test_conformance.py": "test_conformance.py",
    ".github/workflows/conformance.yml": "workflow.yml",
    ".gitignore": "gitignore",
}
"""The files of a repository, and the template of each."""


class _Template(string.Template):
    delimiter = "%"


def render(name: str, into: Path) -> Path:
    """Write the repository of a plugin for backend `name` below `into`; returns its folder.

    Raises `CommError` (CONFIG), before anything is written, for a name that
    cannot be a backend's or is one's already, and for a folder that exists.
    """
    _check_name(name)
    distribution = f"commlayer-{name.replace('_', '-')}"
    words = {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "package": f"commlayer_{name}",
        "distribution": distribution,
    }
    folder = into / distribution
    templates = importlib.resources.files(__name__) / "templates"
    try:
        folder.mkdir(parents=True)
        for path, template in _TEMPLATES.items():
            text = (templates / f"{template}.tmpl").read_text("utf-8") if template else ""
            file = folder / _Template(path).substitute(words)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(_Template(text).substitute(words), "utf-8")
    except OSError as error:
        raise _refusal(name, str(error), "Choose a folder with --into, or remove it") from error
    return folder


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == AUTO:
        raise _refusal(
            name,
            "it cannot be the name of a backend",
            f"Use lower-case letters, digits and single underscores, and not {AUTO!r}",
        )
    if name in default_registry().names():
        raise _refusal(name, "an installed backend has that name", "Choose another one")


def _refusal(name: str, cause: str, cure: str) -> CommError:
    return CommError(ErrorKind.CONFIG, f"new plugin {name!r}", cause, cure)
