"""Messages on their way out: what those of one shape have in common, and one of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commlayer.wire.frame import (
    DEFINE,
    LONG,
    PREFIX_BYTES,
    VALUE,
    Body,
    Kind,
    Placement,
    capacity,
    encode_body,
    encode_prefix,
    encode_shape,
)
from commlayer.wire.storage import bytes_of
from commlayer.wire.tensors import TensorMeta, as_bytes, is_plain, meta_of

_MOST_LAYOUTS = 1024


class Layout:
    """What messages of one shape have in common: kind, tensors, and where these travel.

    Compared by identity: a `Layouts` makes each of them once.
    """

    __slots__ = (
        "apart",
        "at_most",
        "header_bytes",
        "inline",
        "kind",
        "payload",
        "placements",
        "room",
        "shape",
        "tensor_bytes",
    )

    def __init__(
        self,
        kind: Kind,
        metas: tuple[TensorMeta, ...],
        placements: bytes,
        inline_bytes: int,
        at_most: int,
    ) -> None:
        body = Body(metas, placements, at_most)
        sizes = [meta.nbytes for meta in metas]
        self.kind = kind
        self.placements = placements
        self.at_most = at_most
        self.room = capacity(inline_bytes)
        self.shape = encode_shape(metas, placements, at_most)
        self.inline = body.inline_bytes
        self.payload = [
            size
            for size, place in zip(sizes, placements, strict=True)
            if place == Placement.MESSAGE
        ]
        self.apart = any(place >= Placement.MESSAGE for place in placements)
        self.header_bytes = PREFIX_BYTES + len(self.shape)
        self.tensor_bytes = sum(sizes)


class Flat(NamedTuple):
    """The tensors of a dict that holds nothing else, ready to be sent, and what is known of it.

    `known` is the layout and the packed value of an equal dict that was learnt, and
    `key` what to learn it by: ``None`` for a dict that has to be packed.
    """

    tensors: list[Tensor]
    key: Any = None
    known: tuple[Layout, bytes] | None = None


class Layouts:
    """Finds the layout of tensors, and makes messages.

    Small tensors travel inside the header while they fit into `inline_bytes`;
    those that `on_device` names go to the device transport.
    """

    def __init__(self, inline_bytes: int, on_device: Callable[[Tensor], bool] | None) -> None:
        self._inline_bytes = inline_bytes
        self._on_device = on_device
        self._layouts: OrderedDict[Any, Layout] = OrderedDict()
        self._flat: OrderedDict[Any, tuple[Layout, bytes]] = OrderedDict()

    def place(self, kind: Kind, tensors: Sequence[Tensor], at_most: int, reserved: bool) -> Layout:
        """The layout of `tensors`, which are contiguous.

        With `reserved` the only tensor travels as the message of `at_most` bytes.
        """
        key = (
            kind, at_most, reserved,
            *[(t.dtype, t.shape, t.device, self._is_on_device(t)) for t in tensors],
        )  # fmt: skip
        found = self._layouts.get(key)
        if found is None:
            placements = bytes([Placement.RESERVED]) if reserved else self._place(tensors)
            metas = tuple(meta_of(tensor) for tensor in tensors)
            found = Layout(kind, metas, placements, self._inline_bytes, at_most)
            _remember(self._layouts, key, found)
        return found

    def _is_on_device(self, tensor: Tensor) -> bool:
        return self._on_device is not None and self._on_device(tensor)

    def _place(self, tensors: Sequence[Tensor]) -> bytes:
        room = self._inline_bytes
        placements = bytearray(len(tensors))
        for index, tensor in enumerate(tensors):
            size = tensor.nbytes
            if size == 0:
                continue
            if self._is_on_device(tensor):
                placements[index] = Placement.DEVICE
            elif size <= room:
                room -= size
                placements[index] = Placement.INLINE
            else:
                placements[index] = Placement.MESSAGE
        return bytes(placements)

    def flat(self, value: Mapping[str, Any]) -> Flat:
        """What is known of `value`, a dict of str to tensors in host memory if it has a key."""
        if type(value) is not dict:
            return Flat([])
        tensors = list(value.values())
        parts = []
        for name, tensor in value.items():
            if type(name) is not str or not is_plain(tensor) or self._is_on_device(tensor):
                return Flat(tensors)
            parts.append((tensor.dtype, tensor.shape))
        if len(set(map(id, tensors))) != len(tensors):
            return Flat(tensors)
        key = (*value, *parts)
        return Flat(tensors, key, self._flat.get(key))

    def learn(self, key: Any, layout: Layout, packed: bytes) -> None:
        """Remember what a dict of tensors became, for the next one with the same key."""
        _remember(self._flat, key, (layout, packed))


def _remember(known: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    if len(known) > _MOST_LAYOUTS:
        known.popitem(last=False)


class Outgoing:
    """A message, ready to be posted on any number of lanes.

    `payload` are the tensors of `Placement.MESSAGE`, `device_payload` what goes
    to the device transport, each as bytes.
    """

    __slots__ = (
        "_inline",
        "device_payload",
        "layout",
        "nbytes",
        "payload",
        "reserved",
        "step",
        "value",
    )

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[Tensor],
        value: bytes,
        step: int = -1,
        reserved: Tensor | None = None,
    ) -> None:
        """`tensors` are contiguous; `reserved` is what the only one travels as, if so placed."""
        self.layout = layout
        self.value = value
        self.step = step
        self.payload: list[Tensor] = []
        self.device_payload: list[Tensor] = []
        self.reserved = reserved is not None
        self.nbytes = layout.header_bytes + layout.tensor_bytes + len(value)
        self._inline: list[Tensor] = []
        for tensor, place in zip(tensors, layout.placements, strict=True):
            if place == Placement.INLINE:
                self._inline.append(tensor)
            elif place == Placement.MESSAGE:
                self.payload.append(as_bytes(tensor))
            elif place == Placement.DEVICE:
                self.device_payload.append(as_bytes(tensor))
        if reserved is not None:
            self.device_payload.append(reserved)

    @property
    def kind(self) -> Kind:
        return self.layout.kind

    def head(
        self, sequence: int, schema: int = 0, *, named: bool = False, value: bool = True, slot: int
    ) -> tuple[Tensor, Tensor | None]:
        """The header message, and its body where that is a message of its own.

        With `schema` the message defines it, or names it if it is `named`; then
        the body is the value alone, or nothing without `value`.
        """
        layout = self.layout
        if not named:
            flags = DEFINE if schema else 0
            body = encode_body(layout.shape, self.value)
        elif value:
            flags, body = VALUE, self.value
        else:
            flags, body = 0, b""
        long = PREFIX_BYTES + len(body) + layout.inline > layout.room
        if long:
            flags |= LONG
        prefix = encode_prefix(
            layout.kind, flags, slot, sequence, self.step, schema, body, layout.inline
        )
        inline = [bytes_of(tensor) for tensor in self._inline]
        if long:
            return _tensor_of(prefix, *inline), _tensor_of(body)
        return _tensor_of(prefix, body, *inline), None


def _tensor_of(*parts: bytes | memoryview) -> Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def plain(kind: Kind, value: bytes = b"") -> Outgoing:
    """A message without tensors."""
    return Outgoing(_PLAIN[kind], (), value)


_PLAIN = {kind: Layout(kind, (), b"", 0, -1) for kind in (Kind.CONTROL, Kind.GOODBYE)}
