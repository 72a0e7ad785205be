"""Writes a value as tokens, or says why it cannot be sent."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, Flag
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from msgspec.msgpack import Ext
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About, CommError, ErrorKind
from commlayer.wire.tensors import sendable
from commlayer.wire.values import codes
from commlayer.wire.values.arrays import array_parts, numpy, scalar_parts
from commlayer.wire.values.codes import COMPLEX_FORMAT, short
from commlayer.wire.values.registered import Registered, by_class, flag_bits, is_registrable

T = TypeVar("T")

_PLAIN = frozenset({type(None), bool, int, float, str})

_encode = msgspec.msgpack.Encoder().encode


def pack(value: Any, limits: CommConfig, operation: About) -> tuple[bytes, list[Tensor]]:
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
    except MemoryError as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation,
            "there is no memory to write the value",
            "Send less at once",
        ) from error
    except RecursionError as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation,
            "value is nested deeper than the rest of this thread's stack",
            "Send a flatter value",
        ) from error
    return data, packer.tensors


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

    def __init__(self, limits: CommConfig, operation: About) -> None:
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
        self.put_items(container, items, depth, lambda i: f"{{{short(items[i])}}}")
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
    _put_entries(packer, value, list(value), list(value.values()), depth)


def _put_mapping(packer: _Packer, value: Mapping[Any, Any], depth: int) -> None:
    # Its own items, not its length: it may be computed, and run code of the user.
    items = _read(lambda: list(value.items()))
    _put_entries(packer, value, [key for key, _ in items], [item for _, item in items], depth)


def _put_entries(
    packer: _Packer, value: object, keys: list[Any], items: list[Any], depth: int
) -> None:
    packer.open(codes.DICT, len(keys), depth)
    packer.put_hashable(value, keys, depth)
    packer.put_items(value, items, depth, lambda i: f"[{short(keys[i])}]")


def _read(read: Callable[[], T]) -> T:
    """What `read` returns; it may run code of the user, which may raise anything."""
    try:
        return read()
    except Exception as error:
        raise _Refused(
            f"cannot be read ({type(error).__name__}: {error})", "Correct its class"
        ) from error


def _put_size(packer: _Packer, value: torch.Size, depth: int) -> None:
    if any(type(extent) is not int for extent in value):
        raise _Refused("is a torch.Size with symbolic extents", "Send concrete numbers")
    _put_sequence(codes.SIZE, packer, tuple(value), depth)


def _put_tensor(packer: _Packer, value: Tensor, depth: int) -> None:
    index = packer.indices.get(id(value))
    if index is None:
        try:
            tensor = sendable(value, packer.operation, packer.limits)
        except CommError as error:
            raise _Refused(f"cannot be sent: {error.cause}", error.cure) from error
        index = packer.indices[id(value)] = len(packer.tensors)
        packer.tensors.append(tensor)
        packer.originals.append(value)
    packer.holes += 1
    packer.leaf(codes.TENSOR, index.to_bytes(4, "big"))


def _put_bytes(packer: _Packer, value: bytes, depth: int) -> None:
    if len(value) > packer.limits.max_header_bytes:
        raise _Refused(
            f"has {len(value)} bytes, more than "
            f"max_header_bytes = {packer.limits.max_header_bytes}",
            "Send large data as a tensor, or raise the limit on all ranks",
        )
    packer.leaf(codes.BYTES, value)


def _put_complex(packer: _Packer, value: complex, depth: int) -> None:
    packer.leaf(codes.COMPLEX, COMPLEX_FORMAT.pack(value.real, value.imag))


def _put_dtype(packer: _Packer, value: torch.dtype, depth: int) -> None:
    packer.leaf(codes.DTYPE, str(value).removeprefix("torch.").encode())


def _put_device(packer: _Packer, value: torch.device, depth: int) -> None:
    packer.leaf(codes.DEVICE, str(value).encode())


_PUT: dict[type, Callable[[_Packer, Any, int], None]] = {
    Tensor: _put_tensor,
    torch.nn.Parameter: _put_tensor,
    list: partial(_put_sequence, codes.LIST),
    tuple: partial(_put_sequence, codes.TUPLE),
    dict: _put_dict,
    set: partial(_put_set, codes.SET),
    frozenset: partial(_put_set, codes.FROZENSET),
    torch.Size: _put_size,
    bytes: _put_bytes,
    complex: _put_complex,
    torch.dtype: _put_dtype,
    torch.device: _put_device,
}


def _put_other(packer: _Packer, value: Any, depth: int) -> None:
    kind = type(value)
    entry = by_class.get(kind)
    if entry is not None:
        if entry.encode is not None:
            _put_encoded(packer, entry, value, depth)
        else:
            (_put_member if issubclass(kind, Enum) else _put_object)(packer, entry, value, depth)
    elif isinstance(value, Tensor):
        _put_tensor(packer, value, depth)
    elif isinstance(value, Mapping):
        _put_mapping(packer, value, depth)
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
    if is_registrable(kind):
        return "Register the class on all ranks (`commlayer.register`)"
    return (
        "Convert it to plain values, register its class on all ranks (`commlayer.register` with "
        "encode and decode), or set allow_pickle on all ranks if all of them are trusted"
    )


def _put_member(packer: _Packer, entry: Registered, value: Any, depth: int) -> None:
    if isinstance(value, Flag) and value.value & ~flag_bits(type(value)):
        raise _Refused(f"{value!r} has bits that {entry.name} does not declare", "Clear them")
    packer.open(codes.MEMBER, 1, depth, entry.name.encode())
    packer.tokens.append(value.value if isinstance(value, Flag) else value.name)


def _put_object(packer: _Packer, entry: Registered, value: Any, depth: int) -> None:
    names = _read(lambda: [name for name in entry.fields if hasattr(value, name)])
    if missing := entry.required.difference(names):
        raise _Refused(f"lacks the field {min(missing)!r} of its class", "Set it before sending")
    packer.open(codes.OBJECT, len(names), depth, entry.name.encode())
    packer.tokens.extend(names)
    fields = _read(lambda: [getattr(value, name) for name in names])
    packer.put_items(value, fields, depth, lambda i: f".{names[i]}")


def _put_encoded(packer: _Packer, entry: Registered, value: Any, depth: int) -> None:
    packer.open(codes.ENCODED, 1, depth, entry.name.encode())
    assert entry.encode is not None
    try:
        encoded = entry.encode(value)
    except Exception as error:
        raise _Refused(
            f"cannot be encoded ({type(error).__name__}: {error})",
            f"Correct the function `encode` of {entry.name}",
        ) from error
    packer.put_items(value, (encoded,), depth, lambda i: " as encoded")


def _is_numpy(value: Any) -> bool:
    np = numpy()
    return type(value) is np.ndarray or (
        isinstance(value, np.generic) and type(value) is value.dtype.type
    )


def _put_array(packer: _Packer, value: Any, depth: int) -> None:
    code = codes.ARRAY if type(value) is numpy().ndarray else codes.SCALAR
    try:
        parts = array_parts(value) if code == codes.ARRAY else scalar_parts(value)
    except ValueError as error:
        raise _Refused(f"is a NumPy value that cannot be sent: {error}", "Convert it") from error
    packer.open(code, len(parts), depth)
    for part in parts:
        packer.put(part, depth + 1)


def _put_pickle(packer: _Packer, value: Any) -> None:
    try:
        packer.leaf(codes.PICKLE, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
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
        return Ext(codes.INTEGER, token.to_bytes(size, "big", signed=True))
    if type(token) is str and not token.isascii():
        return Ext(codes.TEXT, token.encode("utf-8", "surrogatepass"))
    return token
