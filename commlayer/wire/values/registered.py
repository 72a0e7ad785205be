"""Classes whose instances may travel."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable
from enum import Enum, Flag
from functools import cache
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

C = TypeVar("C", bound=type)

_NATIVE = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
    Tensor,
    torch.nn.Parameter,
    torch.Size,
    torch.dtype,
    torch.device,
)


class Registered(msgspec.Struct, frozen=True):
    """A class and how to rebuild it.

    By ``make(**fields)``, then setting the `late` fields; or, if it has an `encode`, by
    ``make`` of what that returned.
    """

    cls: Any
    name: str
    make: Callable[..., Any]
    fields: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    encode: Callable[[Any], Any] | None = None


by_name: dict[str, Registered] = {}
by_class: dict[type, Registered] = {}


def register(
    cls: C,
    name: str | None = None,
    *,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> C:
    """Let instances of exactly `cls` travel; returns `cls`, so that it serves as a decorator.

    `cls` is a dataclass, a named tuple, an enum, a `msgspec.Struct` or a pydantic
    model, or any class with `encode` and `decode`.  It is registered under the same
    `name` (default: module and qualified name) on every rank.

    A receiver calls ``cls(**fields)``, ``__post_init__`` included, then sets the fields
    with ``init=False``; a model it validates.  With functions, the sender calls
    ``encode(instance)``, which returns any value that can travel, and the receiver
    ``decode(value)``, which returns an instance of `cls`.  It calls nothing else that
    a message names.  Functions may run on threads of the library.

    Raises `ValueError` for any other class, for one that its fields cannot rebuild,
    and for a name that another class has.
    """
    if not isinstance(cls, type):
        raise ValueError(f"{cls!r} is not a class")
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    entry = _entry(cls, name) if encode is decode is None else _coded(cls, name, encode, decode)
    known = by_name.get(name)
    if known is not None and _identity(known.cls) != _identity(cls):
        raise ValueError(f"the name {name!r} is registered for {known.cls!r}; choose another")
    by_name[name] = by_class[cls] = entry
    return cls


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _coded(cls: Any, name: str, encode: Any, decode: Any) -> Registered:
    if encode is None or decode is None:
        raise ValueError(f"{cls!r} needs both encode and decode")
    for function in (encode, decode):
        if not callable(function):
            raise ValueError(f"{function!r} is not a function")
    if cls in _NATIVE:
        raise ValueError(f"instances of {cls!r} travel already")
    return Registered(cls, name, decode, encode=encode)


def _entry(cls: Any, name: str) -> Registered:
    if issubclass(cls, Enum):
        return Registered(cls, name, cls)
    if is_model(cls):
        return _model(cls, name)
    if dataclasses.is_dataclass(cls):
        fields = {field.name: field.init for field in dataclasses.fields(cls)}
    elif issubclass(cls, msgspec.Struct):
        fields = dict.fromkeys(cls.__struct_fields__, True)
    elif is_named_tuple(cls):
        fields = dict.fromkeys(cls._fields, True)
    else:
        raise ValueError(
            f"{cls!r} is neither a dataclass, a named tuple nor an enum, nor a Struct or model: "
            "pass encode and decode"
        )
    passed = frozenset(field for field, init in fields.items() if init)
    parameters = inspect.signature(cls).parameters
    required = frozenset(key for key, one in parameters.items() if one.default is one.empty)
    if not required <= passed <= parameters.keys():
        odd = min((required - passed) | (passed - parameters.keys()))
        raise ValueError(f"{cls!r} cannot be called with its fields: {odd!r} is not one of both")
    return Registered(cls, name, cls, tuple(fields), required, frozenset(fields) - passed)


def is_model(cls: Any) -> bool:
    """Whether `cls` is a pydantic model; where there is one, pydantic is loaded."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def _model(cls: Any, name: str) -> Registered:
    def make(**fields: Any) -> Any:
        return cls.model_validate(fields, by_alias=False, by_name=True)

    fields = cls.model_fields
    required = frozenset(key for key, field in fields.items() if field.is_required())
    return Registered(cls, name, make, tuple(fields), required)


def is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


def is_registrable(cls: Any) -> bool:
    """Whether `register` takes `cls` without functions."""
    return (
        issubclass(cls, (Enum, msgspec.Struct))
        or dataclasses.is_dataclass(cls)
        or is_named_tuple(cls)
        or is_model(cls)
    )


@cache
def flag_bits(cls: type[Flag]) -> int:
    """All bits that the flag declares; others are never built, whatever its boundary says."""
    bits = 0
    for member in cls.__members__.values():
        bits |= member.value
    return bits
