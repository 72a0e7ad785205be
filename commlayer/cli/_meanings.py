"""What facts mean, read from the docstrings of `commlayer.semantics`.

Python keeps no docstring of an attribute, so the module's source is parsed.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise

from commlayer import semantics


def fact_meaning(fact: str, value: object) -> str:
    """What the fact named `fact` is about; empty where the source says nothing."""
    if isinstance(value, Enum):
        return " ".join((type(value).__doc__ or "").split())
    texts = (_docstrings().get(f"{owner}.{fact}") for owner in ("OperationSemantics", "Semantics"))
    return next(filter(None, texts), "")


def value_meaning(value: object) -> str:
    """What this value of an enumerated fact says; empty for other values."""
    if not isinstance(value, Enum):
        return ""
    return _docstrings().get(f"{type(value).__name__}.{value.name}", "")


@functools.cache
def _docstrings() -> dict[str, str]:
    try:
        tree = ast.parse(inspect.getsource(semantics))
    except OSError:  # installed without sources
        return {}
    return {
        f"{node.name}.{attribute}": " ".join(text.split())
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for attribute, text in _attributes(node)
    }


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Pairs of attribute and the string literal that follows its assignment."""
    for statement, following in pairwise(node.body):
        match statement, following:
            case (
                (
                    ast.Assign(targets=[ast.Name(id=attribute)])
                    | ast.AnnAssign(target=ast.Name(id=attribute))
                ),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield attribute, text
