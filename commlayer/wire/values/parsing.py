"""Reads a value from tokens that are trusted in nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, Flag
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About
from commlayer.wire.tensors import ALL_DTYPES
from commlayer.wire.values import codes
from commlayer.wire.values.arrays import array_of, scalar_of
from commlayer.wire.values.codes import COMPLEX_FORMAT, short
from commlayer.wire.values.faults import Malformed, Unbuildable, no_memory
from commlayer.wire.values.registered import Registered, by_name, flag_bits

_DEVICE_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}(:[0-9]{1,3})?")
_MAX_EQUAL_HASHES = 1024


class Parsed:
    """A checked value that waits for its tensors."""

    __slots__ = ("_failure", "_root", "reusable")

    def __init__(self, root: Any, failure: Unbuildable | None = None) -> None:
        self._root = root
        self._failure = failure
        keys = root.keys() if type(root) is _Deferred else None
        is_flat = keys is not None and all(type(item) is _Hole for item in root.items)
        self.reusable = is_flat and all(type(key) is str for key in keys or ())
        """Whether `build` may be called again: the value is a dict of str to tensors."""

    def build(self, tensors: Sequence[Tensor], operation: About) -> Any:
        """Return the value with `tensors` in their places; called once unless `reusable`.

        Raises `CommError` (PROTOCOL) where this rank cannot make the value: it does
        not know a class, a class refuses its fields, or memory is short.
        """
        failure = self._failure
        try:
            if failure is None:
                return _fill(self._root, tensors)
        except Unbuildable as unbuildable:
            failure = unbuildable
        except MemoryError as error:
            failure = no_memory(error)
        assert failure is not None
        raise failure.error(operation) from failure.__cause__

    def places(self) -> dict[str, int] | None:
        """Of a dict, which tensor each key holds; ``None`` where the value cannot be made."""
        if self._failure is not None:
            return None
        root = self._root
        keys = root.keys() if type(root) is _Deferred else None
        pairs = zip(keys, root.items, strict=True) if keys is not None else ()
        return {key: item.index for key, item in pairs if type(item) is _Hole}


def parse(
    data: bytes | memoryview, tensor_count: int, limits: CommConfig, operation: About
) -> Parsed:
    """Read and check what `pack` wrote for a message with `tensor_count` tensors.

    `data` is trusted in nothing.  Raises `CommError` (PROTOCOL) for bytes that
    `pack` under the same limits cannot have written, pickled values without
    ``limits.allow_pickle`` among them.  What it can have written and this rank cannot
    make raises in `Parsed.build`, so that the message fails and nothing after it.
    """
    try:
        if len(data) > limits.max_header_bytes:
            raise Malformed(
                f"{len(data)} bytes exceed max_header_bytes = {limits.max_header_bytes}"
            )
        try:
            tokens = _decoder(limits.max_items).decode(data)
        except msgspec.DecodeError as error:
            raise Malformed(str(error)) from error
        parser = _Parser(tokens, tensor_count, limits)
        root = parser.take(1)
        parser.finish()
    except RecursionError as error:
        short = Unbuildable(
            "it is nested deeper than the rest of this thread's stack", "Send a flatter value"
        )
        short.__cause__ = error
        return Parsed(None, short)
    except MemoryError as error:
        return Parsed(None, no_memory(error))
    except Unbuildable as unbuildable:
        return Parsed(None, unbuildable)
    except Malformed as malformed:
        raise malformed.error(operation) from malformed.__cause__
    return Parsed(root)


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

    def keys(self) -> Sequence[Any] | None:
        """Those of a dict; ``None`` for anything else."""
        make = self.make
        return make.args[0] if type(make) is partial and make.func is _make_dict else None


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

    def __init__(self, tokens: list[Any], tensor_count: int, limits: CommConfig) -> None:
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
            raise Malformed("values are missing at the end") from None
        self.at += 1
        if type(token) is not Ext:
            return token
        take = _TAKE.get(token.code)
        if take is None:
            raise Malformed(f"unknown extension code {token.code}")
        return take(self, bytes(token.data), depth)

    def take_items(self, count: int, depth: int) -> list[Any]:
        """Take the items of a container at `depth`."""
        if depth > self.limits.max_depth:
            raise Malformed(f"it is nested deeper than max_depth = {self.limits.max_depth}")
        end = self.at + count
        if end > len(self.tokens):
            raise Malformed("a container claims more values than follow")
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
            raise Malformed("a tensor is a key or in a set")
        try:
            distinct = len(set(map(hash, items))) if count > _MAX_EQUAL_HASHES else count
        except Exception as error:
            raise Unbuildable("a key or a member of a set has no hash") from error
        if count - distinct > _MAX_EQUAL_HASHES:
            raise Malformed("too many keys have the same hash")
        return items

    def finish(self) -> None:
        if self.at != len(self.tokens):
            raise Malformed("values follow after the end")
        if len(self.seen) != self.tensor_count:
            raise Malformed(
                f"{self.tensor_count} tensors were sent, the value has {len(self.seen)} of them"
            )


def _count(data: bytes) -> int:
    if len(data) != 4:
        raise Malformed("a number has the wrong length")
    return int.from_bytes(data, "big")


def _text(data: bytes, errors: str = "strict") -> str:
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise Malformed("a text is not UTF-8") from error


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
        raise Unbuildable("a member of a set has no hash") from error
    if len(members) != len(items):
        raise Unbuildable("a set has a member twice")
    return members


def _take_size(parser: _Parser, data: bytes, depth: int) -> torch.Size:
    items = parser.take_items(_count(data), depth)
    if any(type(item) is not int or not -(2**63) <= item < 2**63 for item in items):
        raise Malformed("a torch.Size has an impossible extent")
    return torch.Size(items)


def _take_dict(parser: _Parser, data: bytes, depth: int) -> Any:
    count = _count(data)
    keys = parser.take_hashable(count, depth)
    holes = parser.holes
    values = parser.take_items(count, depth)
    try:
        result = dict(zip(keys, values, strict=True))
    except Exception as error:
        raise Unbuildable("a key has no hash") from error
    if len(result) != count:
        raise Unbuildable("a dict has a key twice")
    return result if parser.holes == holes else _Deferred(partial(_make_dict, keys), values)


def _make_dict(keys: Iterable[Any], values: Iterable[Any]) -> dict[Any, Any]:
    return dict(zip(keys, values, strict=True))


def _registered(name: str) -> Registered:
    entry = by_name.get(name)
    if entry is None:
        raise Unbuildable(
            f"the class {short(name)} is not registered on this rank",
            "Register it on all ranks (`commlayer.register`)",
        )
    return entry


def _take_object(parser: _Parser, data: bytes, depth: int) -> Any:
    count = _count(data[:4])
    entry = _registered(_text(data[4:]))
    if issubclass(entry.cls, Enum):
        raise Unbuildable(f"the enum {entry.name} has no fields")
    if entry.encode is not None:
        raise Unbuildable(
            f"{entry.name} has an `encode` on this rank only", "Register it alike on all ranks"
        )
    names = parser.take_items(count, depth)
    if any(type(name) is not str for name in names) or len(set(names)) != count:
        raise Malformed(f"the fields of {entry.name} are not named once each")
    if unlike := set(names).difference(entry.fields) | entry.required.difference(names):
        raise Unbuildable(
            f"the field {short(min(unlike))} of {entry.name} exists on one rank only",
            "Run the same version of the class on all ranks",
        )
    holes = parser.holes
    values = parser.take_items(count, depth)
    make = partial(_make_object, entry, names)
    return make(values) if parser.holes == holes else _Deferred(make, values)


def _make_object(entry: Registered, names: Sequence[str], values: Sequence[Any]) -> Any:
    fields = dict(zip(names, values, strict=True))
    try:
        late = {name: fields.pop(name) for name in entry.late.intersection(names)}
        made = entry.make(**fields)
        for name, value in late.items():
            object.__setattr__(made, name, value)
    except Exception as error:
        raise Unbuildable(f"{entry.name} refuses its fields ({error})") from error
    return made


def _take_encoded(parser: _Parser, data: bytes, depth: int) -> Any:
    if _count(data[:4]) != 1:
        raise Malformed("an encoded object is not one value")
    entry = _registered(_text(data[4:]))
    if entry.encode is None:
        raise Unbuildable(
            f"{entry.name} has no `decode` on this rank", "Register it alike on all ranks"
        )
    holes = parser.holes
    items = parser.take_items(1, depth)
    make = partial(_decode, entry)
    return make(items) if parser.holes == holes else _Deferred(make, items)


def _decode(entry: Registered, items: Sequence[Any]) -> Any:
    try:
        made = entry.make(items[0])
    except Exception as error:
        raise Unbuildable(f"`decode` of {entry.name} raises ({error})") from error
    if not isinstance(made, entry.cls):
        raise Unbuildable(
            f"`decode` of {entry.name} returned {short(made)}", "Have it return an instance"
        )
    return made


def _take_member(parser: _Parser, data: bytes, depth: int) -> Any:
    entry = _registered(_text(data[4:]))
    if not issubclass(entry.cls, Enum) or _count(data[:4]) != 1:
        raise Unbuildable(f"{entry.name} is not an enum")
    (member,) = parser.take_items(1, depth)
    try:
        if issubclass(entry.cls, Flag):
            if type(member) is int and not member & ~flag_bits(entry.cls):
                return entry.cls(member)
        elif type(member) is str:
            return entry.cls[member]
    except Exception:
        pass
    raise Unbuildable(f"the enum {entry.name} has no member {short(member)} on this rank")


def _take_tensor(parser: _Parser, data: bytes, depth: int) -> _Hole:
    index = _count(data)
    if index >= parser.tensor_count:
        raise Malformed(f"tensor {index} of {parser.tensor_count} is asked for")
    parser.seen.add(index)
    parser.holes += 1
    return _Hole(index)


def _take_array(make: Any, parser: _Parser, data: bytes, depth: int) -> Any:
    parts = parser.take_items(_count(data), depth)
    try:
        return make(*parts)
    except ImportError as error:
        raise Unbuildable(
            "it holds a NumPy value, and NumPy is missing on this rank", "Install numpy"
        ) from error
    except MemoryError as error:
        raise no_memory(error) from error
    except Exception as error:
        raise Malformed(f"a NumPy value is impossible ({error})") from error


def _take_bytes(parser: _Parser, data: bytes, depth: int) -> bytes:
    return data


def _take_text(parser: _Parser, data: bytes, depth: int) -> str:
    return _text(data, "surrogatepass")


def _take_integer(parser: _Parser, data: bytes, depth: int) -> int:
    return int.from_bytes(data, "big", signed=True)


def _take_complex(parser: _Parser, data: bytes, depth: int) -> complex:
    if len(data) != COMPLEX_FORMAT.size:
        raise Malformed("a complex number has the wrong length")
    return complex(*COMPLEX_FORMAT.unpack(data))


def _take_dtype(parser: _Parser, data: bytes, depth: int) -> torch.dtype:
    name = _text(data)
    if name not in ALL_DTYPES:
        raise Unbuildable(
            f"torch {torch.__version__} on this rank has no dtype {short(name)}",
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
    raise Unbuildable(f"there is no device {short(name)}")


def _take_pickle(parser: _Parser, data: bytes, depth: int) -> Any:
    if not parser.limits.allow_pickle:
        raise Malformed(
            "it holds a pickled value, and allow_pickle is off on this rank",
            "Set allow_pickle on all ranks, if all of them are trusted, or on none",
        )
    try:
        return pickle.loads(data)
    except Exception as error:
        raise Unbuildable(f"a value cannot be unpickled ({error})") from error


_TAKE: dict[int, Callable[[_Parser, bytes, int], Any]] = {
    codes.LIST: partial(_take_sequence, list),
    codes.TUPLE: partial(_take_sequence, tuple),
    codes.SET: partial(_take_set, set),
    codes.FROZENSET: partial(_take_set, frozenset),
    codes.SIZE: _take_size,
    codes.DICT: _take_dict,
    codes.OBJECT: _take_object,
    codes.MEMBER: _take_member,
    codes.ENCODED: _take_encoded,
    codes.TENSOR: _take_tensor,
    codes.ARRAY: partial(_take_array, array_of),
    codes.SCALAR: partial(_take_array, scalar_of),
    codes.BYTES: _take_bytes,
    codes.TEXT: _take_text,
    codes.INTEGER: _take_integer,
    codes.COMPLEX: _take_complex,
    codes.DTYPE: _take_dtype,
    codes.DEVICE: _take_device,
    codes.PICKLE: _take_pickle,
}
