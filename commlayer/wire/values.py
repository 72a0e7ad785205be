"""Values on the wire: trees of plain values and tensors, without pickle.

A tree is written in pre-order as one flat msgpack array of tokens, so that no
decoder recurses over what a peer sent and no claimed size allocates anything.
None, bool, 64-bit int, float and str are their own tokens; everything else
begins with an extension token whose code says what follows:

==============  ==========================  ==================================
code            data of the extension       tokens that follow
==============  ==========================  ==================================
list, tuple,    number of items             the items
set, frozenset,
size
dict            number of entries           the keys, then the values
object          number of fields, class     the names of the fields, the values
member          1, class                    name (a flag: number) of the member
tensor          index of the tensor         none
array           3                           NumPy dtype, shape, bytes
scalar          2                           NumPy dtype, bytes
bytes, text,    the value                   none
integer,
complex, dtype,
device, pickle
==============  ==========================  ==================================

Types are exact: a subclass of a supported type is not one of them.  A tensor
object that occurs twice is sent once and arrives as one object; any other
shared object arrives as copies.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re
import reprlib
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, Flag
from functools import cache, lru_cache, partial
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from commlayer.errors import CommError, ErrorKind
from commlayer.wire.arrays import array_of, array_parts, numpy, scalar_of, scalar_parts
from commlayer.wire.tensors import ALL_DTYPES, Limits, sendable

C = TypeVar("C", bound=type)

_LIST, _TUPLE, _SET, _FROZENSET, _SIZE, _DICT, _OBJECT, _MEMBER, _TENSOR = range(1, 10)
_ARRAY, _SCALAR, _BYTES, _TEXT, _INTEGER, _COMPLEX, _DTYPE, _DEVICE, _PICKLE = range(10, 19)

_PLAIN = frozenset({type(None), bool, int, float, str})
_COMPLEX_FORMAT = struct.Struct(">dd")
_DEVICE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,3})?")
_MAX_EQUAL_HASHES = 1024

_encode = msgspec.msgpack.Encoder().encode


def pack(value: Any, limits: Limits, operation: object) -> tuple[bytes, list[Tensor]]:
    """Write `value`; returns its bytes and the distinct tensors in it, each made `sendable`.

    Raises `CommError` (UNSUPPORTED) that names the place in the tree, before
    anything has left, for an unknown type (unless ``limits.allow_pickle``), a
    tensor that cannot be sent, a tree that contains itself, and one that
    exceeds a limit.
    """
    packer = _Packer(limits, operation)
    try:
        packer.put(value, 1)
        packer.reserve(0)
        data = _encode_tokens(packer.tokens)
        if len(data) > limits.max_header_bytes:
            raise _Refused(
                f"has {len(data)} bytes beside its tensors, more than "
                f"max_header_bytes = {limits.max_header_bytes}",
                "Send large data as tensors, or raise the limit on all ranks",
            )
        total = sum(tensor.nbytes for tensor in packer.tensors)
        if total > limits.max_message_bytes:
            raise _Refused(
                f"has {total} bytes of tensors, more than "
                f"max_message_bytes = {limits.max_message_bytes}",
                "Send it in several messages, or raise the limit on all ranks",
            )
    except _Refused as refused:
        raise CommError(
            ErrorKind.UNSUPPORTED, operation, f"{refused.path()} {refused.cause}", refused.cure
        ) from refused.__cause__
    except RecursionError as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation,
            "value is nested deeper than the rest of this thread's stack",
            "Send a flatter value",
        ) from error
    return data, packer.tensors


class Parsed:
    """A fully checked value that waits for its tensors."""

    __slots__ = ("_operation", "_root", "reusable")

    def __init__(self, root: Any, operation: object) -> None:
        self._root = root
        self._operation = operation
        self.reusable = type(root) is _Deferred and root.is_flat_dict()
        """Whether `build` may be called again: the value is a dict of str to tensors."""

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Return the value with `tensors` in their places; called once unless `reusable`.

        Raises `CommError` (PROTOCOL) only where a registered class that holds a
        tensor refuses its fields.
        """
        try:
            return _fill(self._root, tensors)
        except _Malformed as malformed:
            raise malformed.error(self._operation) from malformed.__cause__


def parse(data: bytes | memoryview, tensor_count: int, limits: Limits, operation: object) -> Parsed:
    """Read and check what `pack` wrote for a message with `tensor_count` tensors.

    `data` is trusted in nothing.  Raises `CommError` (PROTOCOL) for bytes that
    `pack` under the same limits cannot have written, for classes that are not
    registered here, and for pickled values unless ``limits.allow_pickle``.
    """
    try:
        if len(data) > limits.max_header_bytes:
            raise _Malformed(
                f"{len(data)} bytes exceed max_header_bytes = {limits.max_header_bytes}"
            )
        try:
            tokens = _decoder(limits.max_items).decode(data)
        except msgspec.DecodeError as error:
            raise _Malformed(str(error)) from error
        parser = _Parser(tokens, tensor_count, limits)
        root = parser.take(1)
        parser.finish()
    except RecursionError as error:
        raise _Malformed("it is nested deeper than the rest of this thread's stack").error(
            operation
        ) from error
    except _Malformed as malformed:
        raise malformed.error(operation) from malformed.__cause__
    return Parsed(root, operation)


# Registered classes ------------------------------------------------------------------------------


class _Registered(msgspec.Struct, frozen=True):
    """A class and how to rebuild it: `late` fields are set afterwards, the others are passed."""

    cls: Any
    name: str
    fields: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


_by_name: dict[str, _Registered] = {}
_by_class: dict[type, _Registered] = {}


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
    known = _by_name.get(name)
    if known is not None and _identity(known.cls) != _identity(cls):
        raise ValueError(f"the name {name!r} is registered for {known.cls!r}; choose another")
    _by_name[name] = _by_class[cls] = entry
    return cls


def _identity(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _entry(cls: Any, name: str) -> _Registered:
    if issubclass(cls, Enum):
        return _Registered(cls, name)
    if dataclasses.is_dataclass(cls):
        fields = {field.name: field.init for field in dataclasses.fields(cls)}
    elif _is_named_tuple(cls):
        fields = dict.fromkeys(cls._fields, True)
    else:
        raise ValueError(f"{cls!r} is neither a dataclass, a named tuple nor an enum")
    passed = frozenset(field for field, init in fields.items() if init)
    parameters = inspect.signature(cls).parameters
    required = frozenset(key for key, one in parameters.items() if one.default is one.empty)
    if not required <= passed <= parameters.keys():
        odd = min((required - passed) | (passed - parameters.keys()))
        raise ValueError(f"{cls!r} cannot be called with its fields: {odd!r} is not one of both")
    return _Registered(cls, name, tuple(fields), required, frozenset(fields) - passed)


def _is_named_tuple(cls: Any) -> bool:
    return issubclass(cls, tuple) and hasattr(cls, "_fields")


# Sending -----------------------------------------------------------------------------------------


class _Refused(Exception):
    """Why a value cannot be sent; collects the steps to it, innermost first."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(cause)
        self.cause = cause
        self.cure = cure
        self.steps: list[str] = []
        self.containers: list[object] = []

    def passed(self, container: object, step: str) -> None:
        self.containers.append(container)
        self.steps.append(step)

    def path(self) -> str:
        steps = self.steps[::-1]
        if len(steps) > 12:
            steps[6:-6] = ["..."]
        return "value" + "".join(steps)


class _TooDeep(_Refused):
    """Refused for its depth, which a tree that contains itself always reaches."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"is nested deeper than max_depth = {limit}",
            "Send a flatter value, or raise the limit on all ranks",
        )

    def passed(self, container: object, step: str) -> None:
        if any(container is inner for inner in self.containers):
            self.cause = "is reached again inside itself"
            self.cure = "Send a value without cycles"
        super().passed(container, step)


class _Packer:
    """Writes one tree.  `depth` is the number of containers around a value, itself included."""

    __slots__ = ("holes", "indices", "limits", "operation", "originals", "tensors", "tokens")

    def __init__(self, limits: Limits, operation: object) -> None:
        self.limits = limits
        self.operation = operation
        self.tokens: list[Any] = []
        self.tensors: list[Tensor] = []
        self.originals: list[Tensor] = []
        self.indices: dict[int, int] = {}
        self.holes = 0

    def put(self, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self.tokens.append(value)
        else:
            (_PUT.get(kind) or _put_other)(self, value, depth)

    def put_items(
        self, container: object, items: Sequence[Any], depth: int, step: Callable[[int], str]
    ) -> None:
        """Put the items of a container at `depth`; ``step(i)`` names one of them in an error."""
        if _PLAIN.issuperset(map(type, items)):
            self.tokens.extend(items)
            return
        index = 0
        try:
            for index, item in enumerate(items):  # noqa: B007
                self.put(item, depth + 1)
        except _Refused as refused:
            refused.passed(container, step(index))
            raise

    def put_hashable(self, container: object, items: Sequence[Any], depth: int) -> None:
        """Put keys of a dict or members of a set; a tensor has no value to be found by."""
        holes = self.holes
        self.put_items(container, items, depth, lambda i: f"{{{_short(items[i])}}}")
        if self.holes != holes:
            raise _Refused(
                "has a tensor in a key or in a set", "Use a list, or tensors as values of a dict"
            )

    def open(self, code: int, count: int, depth: int, name: bytes = b"") -> None:
        if depth > self.limits.max_depth:
            raise _TooDeep(self.limits.max_depth)
        self.reserve(count)
        self.tokens.append(Ext(code, count.to_bytes(4, "big") + name))

    def reserve(self, count: int) -> None:
        if len(self.tokens) + count > self.limits.max_items:
            raise _Refused(
                f"has more than max_items = {self.limits.max_items} values",
                "Send bulk data as tensors or arrays, or raise the limit on all ranks",
            )

    def leaf(self, code: int, data: bytes) -> None:
        self.tokens.append(Ext(code, data))


def _index_step(index: int) -> str:
    return f"[{index}]"


def _put_sequence(code: int, packer: _Packer, value: Any, depth: int) -> None:
    packer.open(code, len(value), depth)
    packer.put_items(value, value, depth, _index_step)


def _put_set(code: int, packer: _Packer, value: Any, depth: int) -> None:
    packer.open(code, len(value), depth)
    packer.put_hashable(value, list(value), depth)


def _put_dict(packer: _Packer, value: dict[Any, Any], depth: int) -> None:
    packer.open(_DICT, len(value), depth)
    keys = list(value)
    packer.put_hashable(value, keys, depth)
    packer.put_items(value, list(value.values()), depth, lambda i: f"[{_short(keys[i])}]")


def _put_size(packer: _Packer, value: torch.Size, depth: int) -> None:
    if any(type(extent) is not int for extent in value):
        raise _Refused("is a torch.Size with symbolic extents", "Send concrete numbers")
    _put_sequence(_SIZE, packer, tuple(value), depth)


def _put_tensor(packer: _Packer, value: Tensor, depth: int) -> None:
    index = packer.indices.get(id(value))
    if index is None:
        try:
            tensor = sendable(value, packer.operation)
        except CommError as error:
            raise _Refused(f"cannot be sent: {error.cause}", error.cure) from error
        index = packer.indices[id(value)] = len(packer.tensors)
        packer.tensors.append(tensor)
        packer.originals.append(value)
    packer.holes += 1
    packer.leaf(_TENSOR, index.to_bytes(4, "big"))


def _put_bytes(packer: _Packer, value: bytes, depth: int) -> None:
    if len(value) > packer.limits.max_header_bytes:
        raise _Refused(
            f"has {len(value)} bytes, more than "
            f"max_header_bytes = {packer.limits.max_header_bytes}",
            "Send large data as a tensor, or raise the limit on all ranks",
        )
    packer.leaf(_BYTES, value)


def _put_complex(packer: _Packer, value: complex, depth: int) -> None:
    packer.leaf(_COMPLEX, _COMPLEX_FORMAT.pack(value.real, value.imag))


def _put_dtype(packer: _Packer, value: torch.dtype, depth: int) -> None:
    packer.leaf(_DTYPE, str(value).removeprefix("torch.").encode())


def _put_device(packer: _Packer, value: torch.device, depth: int) -> None:
    packer.leaf(_DEVICE, str(value).encode())


_PUT: dict[type, Callable[[_Packer, Any, int], None]] = {
    Tensor: _put_tensor,
    torch.nn.Parameter: _put_tensor,
    list: partial(_put_sequence, _LIST),
    tuple: partial(_put_sequence, _TUPLE),
    dict: _put_dict,
    set: partial(_put_set, _SET),
    frozenset: partial(_put_set, _FROZENSET),
    torch.Size: _put_size,
    bytes: _put_bytes,
    complex: _put_complex,
    torch.dtype: _put_dtype,
    torch.device: _put_device,
}


def _put_other(packer: _Packer, value: Any, depth: int) -> None:
    kind = type(value)
    entry = _by_class.get(kind)
    if isinstance(value, Tensor):
        _put_tensor(packer, value, depth)
    elif entry is not None:
        (_put_member if issubclass(kind, Enum) else _put_object)(packer, entry, value, depth)
    elif kind.__module__ == "numpy" and _is_numpy(value):
        _put_array(packer, value, depth)
    elif packer.limits.allow_pickle:
        _put_pickle(packer, value)
    else:
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise _Refused(f"is of type {name}, which cannot be sent", _cure(kind))


def _cure(kind: type) -> str:
    if issubclass(kind, (bytearray, memoryview)):
        return "Send `bytes(...)` of it"
    if issubclass(kind, Enum) or dataclasses.is_dataclass(kind) or _is_named_tuple(kind):
        return "Register the class on all ranks (`commlayer.register`)"
    return (
        "Convert it to plain values, make it a dataclass and register that on all ranks "
        "(`commlayer.register`), or set allow_pickle on all ranks if all of them are trusted"
    )


@cache
def _flag_bits(cls: type[Flag]) -> int:
    """All bits that the flag declares; others are never built, whatever its boundary says."""
    bits = 0
    for member in cls.__members__.values():
        bits |= member.value
    return bits


def _put_member(packer: _Packer, entry: _Registered, value: Any, depth: int) -> None:
    if isinstance(value, Flag) and value.value & ~_flag_bits(type(value)):
        raise _Refused(f"{value!r} has bits that {entry.name} does not declare", "Clear them")
    packer.open(_MEMBER, 1, depth, entry.name.encode())
    packer.tokens.append(value.value if isinstance(value, Flag) else value.name)


def _put_object(packer: _Packer, entry: _Registered, value: Any, depth: int) -> None:
    names = [name for name in entry.fields if hasattr(value, name)]
    if missing := entry.required.difference(names):
        raise _Refused(f"lacks the field {min(missing)!r} of its class", "Set it before sending")
    packer.open(_OBJECT, len(names), depth, entry.name.encode())
    packer.tokens.extend(names)
    packer.put_items(
        value, [getattr(value, name) for name in names], depth, lambda i: f".{names[i]}"
    )


def _is_numpy(value: Any) -> bool:
    np = numpy()
    return type(value) is np.ndarray or (
        isinstance(value, np.generic) and type(value) is value.dtype.type
    )


def _put_array(packer: _Packer, value: Any, depth: int) -> None:
    code = _ARRAY if type(value) is numpy().ndarray else _SCALAR
    try:
        parts = array_parts(value) if code == _ARRAY else scalar_parts(value)
    except ValueError as error:
        raise _Refused(f"is a NumPy value that cannot be sent: {error}", "Convert it") from error
    packer.open(code, len(parts), depth)
    for part in parts:
        packer.put(part, depth + 1)


def _put_pickle(packer: _Packer, value: Any) -> None:
    try:
        packer.leaf(_PICKLE, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    except Exception as error:
        raise _Refused(f"cannot be pickled: {error}", "Convert it to plain values") from error


def _encode_tokens(tokens: list[Any]) -> bytes:
    """Encode; the rare int and str that msgpack cannot say are looked for only when it fails."""
    try:
        return _encode(tokens)
    except (OverflowError, UnicodeEncodeError):
        return _encode([_extended(token) for token in tokens])


def _extended(token: Any) -> Any:
    if type(token) is int and not -(2**63) <= token < 2**64:
        size = token.bit_length() // 8 + 1
        return Ext(_INTEGER, token.to_bytes(size, "big", signed=True))
    if type(token) is str and not token.isascii():
        return Ext(_TEXT, token.encode("utf-8", "surrogatepass"))
    return token


def _short(value: Any) -> str:
    """A bounded representation of any value, for an error."""
    try:
        return reprlib.repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


# Receiving ---------------------------------------------------------------------------------------


class _Malformed(Exception):
    """What is wrong with the received bytes."""

    def __init__(
        self, cause: str, cure: str = "Check that all ranks run the same version and configuration"
    ) -> None:
        super().__init__(cause[:300])
        self.cure = cure

    def error(self, operation: object) -> CommError:
        return CommError(
            ErrorKind.PROTOCOL,
            operation,
            f"the received value is malformed or not acceptable: {self}",
            self.cure,
        )


class _Hole:
    """The place of a tensor."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Deferred:
    """A container with a hole somewhere below: made from `items` when these are filled."""

    __slots__ = ("items", "make")

    def __init__(self, make: Callable[[Sequence[Any]], Any], items: Sequence[Any]) -> None:
        self.make = make
        self.items = items

    def is_flat_dict(self) -> bool:
        return (
            type(self.make) is partial
            and self.make.func is _make_dict
            and all(type(key) is str for key in self.make.args[0])
            and all(type(item) is _Hole for item in self.items)
        )


def _fill(value: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(value)
    if kind is _Hole:
        return tensors[value.index]
    if kind is _Deferred:
        return value.make([_fill(item, tensors) for item in value.items])
    return value


@lru_cache
def _decoder(max_items: int) -> msgspec.msgpack.Decoder[list[Any]]:
    tokens = Annotated[
        list[bool | int | float | str | Ext | None],
        msgspec.Meta(min_length=1, max_length=max_items),
    ]
    return msgspec.msgpack.Decoder(tokens)


class _Parser:
    """Reads one tree from untrusted tokens.  Containers without tensors are made at once."""

    __slots__ = ("at", "holes", "limits", "seen", "tensor_count", "tokens")

    def __init__(self, tokens: list[Any], tensor_count: int, limits: Limits) -> None:
        self.tokens = tokens
        self.at = 0
        self.limits = limits
        self.tensor_count = tensor_count
        self.seen: set[int] = set()
        self.holes = 0

    def take(self, depth: int) -> Any:
        try:
            token = self.tokens[self.at]
        except IndexError:
            raise _Malformed("values are missing at the end") from None
        self.at += 1
        if type(token) is not Ext:
            return token
        take = _TAKE.get(token.code)
        if take is None:
            raise _Malformed(f"unknown extension code {token.code}")
        return take(self, bytes(token.data), depth)

    def take_items(self, count: int, depth: int) -> list[Any]:
        """Take the items of a container at `depth`."""
        if depth > self.limits.max_depth:
            raise _Malformed(f"it is nested deeper than max_depth = {self.limits.max_depth}")
        end = self.at + count
        if end > len(self.tokens):
            raise _Malformed("a container claims more values than follow")
        items = self.tokens[self.at : end]
        if Ext not in set(map(type, items)):
            self.at = end
            return items
        return [self.take(depth + 1) for _ in range(count)]

    def take_hashable(self, count: int, depth: int) -> list[Any]:
        """Take keys of a dict or members of a set, and bound what hashing them can cost."""
        holes = self.holes
        items = self.take_items(count, depth)
        if self.holes != holes:
            raise _Malformed("a tensor is a key or in a set")
        try:
            distinct = len(set(map(hash, items))) if count > _MAX_EQUAL_HASHES else count
        except Exception as error:
            raise _Malformed("a key or a member of a set has no hash") from error
        if count - distinct > _MAX_EQUAL_HASHES:
            raise _Malformed("too many keys have the same hash")
        return items

    def finish(self) -> None:
        if self.at != len(self.tokens):
            raise _Malformed("values follow after the end")
        if len(self.seen) != self.tensor_count:
            raise _Malformed(
                f"{self.tensor_count} tensors were sent, the value has {len(self.seen)} of them"
            )


def _count(data: bytes) -> int:
    if len(data) != 4:
        raise _Malformed("a number has the wrong length")
    return int.from_bytes(data, "big")


def _text(data: bytes, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise _Malformed("a text is not UTF-8") from error


def _take_sequence(make: Any, parser: _Parser, data: bytes, depth: int) -> Any:
    holes = parser.holes
    items = parser.take_items(_count(data), depth)
    if parser.holes != holes:
        return _Deferred(make, items)
    return items if make is list else make(items)


def _take_set(make: Any, parser: _Parser, data: bytes, depth: int) -> Any:
    items = parser.take_hashable(_count(data), depth)
    try:
        members = make(items)
    except Exception as error:
        raise _Malformed("a member of a set has no hash") from error
    if len(members) != len(items):
        raise _Malformed("a set has a member twice")
    return members


def _take_size(parser: _Parser, data: bytes, depth: int) -> torch.Size:
    items = parser.take_items(_count(data), depth)
    if any(type(item) is not int or not -(2**63) <= item < 2**63 for item in items):
        raise _Malformed("a torch.Size has an impossible extent")
    return torch.Size(items)


def _take_dict(parser: _Parser, data: bytes, depth: int) -> Any:
    count = _count(data)
    keys = parser.take_hashable(count, depth)
    holes = parser.holes
    values = parser.take_items(count, depth)
    try:
        result = dict(zip(keys, values, strict=True))
    except Exception as error:
        raise _Malformed("a key has no hash") from error
    if len(result) != count:
        raise _Malformed("a dict has a key twice")
    return result if parser.holes == holes else _Deferred(partial(_make_dict, keys), values)


def _make_dict(keys: Iterable[Any], values: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def _registered(name: str) -> _Registered:
    entry = _by_name.get(name)
    if entry is None:
        raise _Malformed(
            f"the class {_short(name)} is not registered on this rank",
            "Register it on all ranks (`commlayer.register`)",
        )
    return entry


def _take_object(parser: _Parser, data: bytes, depth: int) -> Any:
    count = _count(data[:4])
    entry = _registered(_text(data[4:]))
    if issubclass(entry.cls, Enum):
        raise _Malformed(f"the enum {entry.name} has no fields")
    names = parser.take_items(count, depth)
    if any(type(name) is not str for name in names) or len(set(names)) != count:
        raise _Malformed(f"the fields of {entry.name} are not named once each")
    if unlike := set(names).difference(entry.fields) | entry.required.difference(names):
        raise _Malformed(
            f"the field {_short(min(unlike))} of {entry.name} exists on one rank only",
            "Run the same version of the class on all ranks",
        )
    holes = parser.holes
    values = parser.take_items(count, depth)
    make = partial(_make_object, entry, names)
    return make(values) if parser.holes == holes else _Deferred(make, values)


def _make_object(entry: _Registered, names: Sequence[str], values: Sequence[Any]) -> Any:
    fields = dict(zip(names, values, strict=True))
    try:
        late = {name: fields.pop(name) for name in entry.late.intersection(names)}
        made = entry.cls(**fields)
        for name, value in late.items():
            object.__setattr__(made, name, value)
    except Exception as error:
        raise _Malformed(f"{entry.name} refuses its fields ({error})") from error
    return made


def _take_member(parser: _Parser, data: bytes, depth: int) -> Any:
    entry = _registered(_text(data[4:]))
    if not issubclass(entry.cls, Enum) or _count(data[:4]) != 1:
        raise _Malformed(f"{entry.name} is not an enum")
    (member,) = parser.take_items(1, depth)
    try:
        if issubclass(entry.cls, Flag):
            if type(member) is int and not member & ~_flag_bits(entry.cls):
                return entry.cls(member)
        elif type(member) is str:
            return entry.cls[member]
    except Exception:
        pass
    raise _Malformed(f"the enum {entry.name} has no member {_short(member)} on this rank")


def _take_tensor(parser: _Parser, data: bytes, depth: int) -> _Hole:
    index = _count(data)
    if index >= parser.tensor_count:
        raise _Malformed(f"tensor {index} of {parser.tensor_count} is asked for")
    parser.seen.add(index)
    parser.holes += 1
    return _Hole(index)


def _take_array(make: Any, parser: _Parser, data: bytes, depth: int) -> Any:
    parts = parser.take_items(_count(data), depth)
    try:
        return make(*parts)
    except ImportError as error:
        raise _Malformed(
            "it holds a NumPy value, and NumPy is missing on this rank", "Install numpy"
        ) from error
    except Exception as error:
        raise _Malformed(f"a NumPy value is impossible ({error})") from error


def _take_bytes(parser: _Parser, data: bytes, depth: int) -> bytes:
    return data


def _take_text(parser: _Parser, data: bytes, depth: int) -> str:
    return _text(data, "surrogatepass")


def _take_integer(parser: _Parser, data: bytes, depth: int) -> int:
    return int.from_bytes(data, "big", signed=True)


def _take_complex(parser: _Parser, data: bytes, depth: int) -> complex:
    if len(data) != _COMPLEX_FORMAT.size:
        raise _Malformed("a complex number has the wrong length")
    return complex(*_COMPLEX_FORMAT.unpack(data))


def _take_dtype(parser: _Parser, data: bytes, depth: int) -> torch.dtype:
    name = _text(data)
    if name not in ALL_DTYPES:
        raise _Malformed(
            f"torch {torch.__version__} on this rank has no dtype {_short(name)}",
            "Run the same version of torch on all ranks",
        )
    return ALL_DTYPES[name]


def _take_device(parser: _Parser, data: bytes, depth: int) -> torch.device:
    name = _text(data)
    try:
        if _DEVICE_NAME.fullmatch(name):
            return torch.device(name)
    except RuntimeError:
        pass
    raise _Malformed(f"there is no device {_short(name)}")


def _take_pickle(parser: _Parser, data: bytes, depth: int) -> Any:
    if not parser.limits.allow_pickle:
        raise _Malformed(
            "it holds a pickled value, and allow_pickle is off on this rank",
            "Set allow_pickle on all ranks, if all of them are trusted, or on none",
        )
    try:
        return pickle.loads(data)
    except Exception as error:
        raise _Malformed(f"a value cannot be unpickled ({error})") from error


_TAKE: dict[int, Callable[[_Parser, bytes, int], Any]] = {
    _LIST: partial(_take_sequence, list),
    _TUPLE: partial(_take_sequence, tuple),
    _SET: partial(_take_set, set),
    _FROZENSET: partial(_take_set, frozenset),
    _SIZE: _take_size,
    _DICT: _take_dict,
    _OBJECT: _take_object,
    _MEMBER: _take_member,
    _TENSOR: _take_tensor,
    _ARRAY: partial(_take_array, array_of),
    _SCALAR: partial(_take_array, scalar_of),
    _BYTES: _take_bytes,
    _TEXT: _take_text,
    _INTEGER: _take_integer,
    _COMPLEX: _take_complex,
    _DTYPE: _take_dtype,
    _DEVICE: _take_device,
    _PICKLE: _take_pickle,
}
