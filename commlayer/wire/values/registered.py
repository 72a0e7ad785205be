"""Classes whose instances may travel."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum, Flag
from functools import cache
from typing import Any, TypeVar

import msgspec

C = TypeVar("C", bound=type)


class Registered(msgspec.Struct, frozen=True):
    """A class and how to rebuild it: `late` fields are set afterwards, the others are passed."""

    cls: Any
    name: str
    fields: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


by_name: dict[str, Registered] = {}
by_class: dict[type, Registered] = {}


def register(cls: C, name: str | None = None) -> C:
    """Let instances of exactly `cls` travel; returns `cls`, so that it serves as a decorator.

    `cls` is a dataclass, a named tuple or an enum, and is registered under the
    same `name` (default: module and qualified name) on every rank.  A receiver
    calls ``cls(**fields)``, ``__post_init__`` included, then sets the fields
    with ``init=False``; it calls nothing else that a message names.  Raises
    `ValueError` for any other class, for a dataclass that its fields cannot
    rebuild, and for a name that another class has.
    """
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    entry = _entry(cls, name)
    known = by_name.get(name)
    if known is not None and _identity(known.cls) != _identity(cls):
        raise ValueError(f"the name {name!r} is registered for {known.cls!r}; choose another")
    by_name[name] = by_class[cls] = entry
    return cls


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _entry(cls: Any, name: str) -> Registered:
    if issubclass(cls, Enum):
        return Registered(cls, name)
    if dataclasses.is_dataclass(cls):
        fields = {field.name: field.init for field in dataclasses.fields(cls)}
    elif is_named_tuple(cls):
        fields = dict.fromkeys(cls._fields, True)
    else:
        raise ValueError(f"{cls!r} is neither a dataclass, a named tuple nor an enum")
    passed = frozenset(field for field, init in fields.items() if init)
    parameters = inspect.signature(cls).parameters
    required = frozenset(key for key, one in parameters.items() if one.default is one.empty)
    if not required <= passed <= parameters.keys():
        odd = min((required - passed) | (passed - parameters.keys()))
        raise ValueError(f"{cls!r} cannot be called with its fields: {odd!r} is not one of both")
    return Registered(cls, name, tuple(fields), required, frozenset(fields) - passed)


def is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


@cache
def flag_bits(cls: type[Flag]) -> int:
    """All bits that the flag declares; others are never built, whatever its boundary says."""
    bits = 0
    for member in cls.__members__.values():
        bits |= member.value
    return bits
