"""The reference lists what is public, and all of it is documented."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import pytest

import commlayer

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
_DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+|py:data):: (\S+?)(?:\(.*)?$", re.MULTILINE)

_WHOLE_MODULE = re.compile(r"^\.\. automodule:: (\S+)\n   :members:(.*)$", re.MULTILINE)


def listed(page: str) -> dict[str, set[str]]:
    """The names that a page documents one by one, by module."""
    found: dict[str, set[str]] = {}
    module = ""
    for directive, name in _DIRECTIVE.findall((REFERENCE / page).read_text()):
        if directive == "currentmodule":
            module = name
        elif directive != "automodule":
            home, _, last = name.rpartition(".") if "." in name else (module, "", name)
            found.setdefault(home, set()).add(last)
    return found


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("api.md", "commlayer"),
        ("plugin-api.md", "commlayer_testkit.conformance"),
        ("plugin-api.md", "commlayer_testkit.sim"),
    ],
)
def test_the_reference_lists_what_all_lists(page: str, module: str) -> None:
    public = importlib.import_module(module).__all__
    assert sorted(public) == sorted(listed(page)[module])
    assert len(set(public)) == len(public)


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'isend'"):
        _ = commlayer.isend  # type: ignore[attr-defined]


def public_objects() -> Iterator[tuple[str, Any]]:
    """Everything that the two pages document, by dotted name."""
    for page in ("api.md", "plugin-api.md"):
        text = (REFERENCE / page).read_text()
        for module, names in listed(page).items():
            for name in names:
                yield f"{module}.{name}", getattr(importlib.import_module(module), name)
        for module, named in _WHOLE_MODULE.findall(text):
            chosen = named.replace(" ", "").split(",") if named else None
            for name, value in vars(importlib.import_module(module)).items():
                public = not name.startswith("_") and getattr(value, "__module__", "") == module
                if public and (chosen is None or name in chosen):
                    yield f"{module}.{name}", value


_OF_PYTEST = ("pytest_", "setup_class", "teardown_class")
PUBLIC = dict(public_objects())


def undocumented(value: Any) -> Iterator[str]:
    """Members of a class that are public and have no docstring, inherited ones included."""
    for name, member in inspect.getmembers(value):
        if name.startswith(("_", *_OF_PYTEST)) or isinstance(member, Enum):
            continue
        declared = inspect.getattr_static(value, name)
        is_field = issubclass(value, msgspec.Struct) and name in value.__struct_fields__
        if is_field or not (inspect.isroutine(member) or isinstance(declared, property)):
            continue
        home = next(cls for cls in value.__mro__ if name in vars(cls))
        if home.__module__.startswith("commlayer") and not inspect.getdoc(member):
            yield name


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_a_docstring(name: str) -> None:
    value = PUBLIC[name]
    if isinstance(value, (dict, int)):
        return  # data: documented in place
    assert inspect.getdoc(value), name
    if inspect.isclass(value):
        own = value.__doc__ or f"{value.__name__}("
        assert not own.startswith(f"{value.__name__}("), f"{name}: made by a decorator"
        assert list(undocumented(value)) == []
