"""Messages on their way out: their layout, their header, and what a lane need not say again.

Most messages of a lane look alike.  What those of one shape have in common is a `Layout`,
made once.  A layout that comes a second time on a lane gets a number, with which later
messages *name* it instead of describing it: a *schema*.  If it has payload of moderate size
it may also get one of a few *slots*: a native tag on which only payload of this schema
travels, so that the receiver can post the receives of the next message before its header
is here.  The sender decides, so both ends agree without a word.

A posted receive cannot be withdrawn.  When a slot changes hands, and at the end, the sender
therefore completes what was posted ahead by fillers of one byte, which fit every receive.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from commlayer.wire.frame import (
    APART,
    CHECKSUM,
    DEFINE,
    EARNED_SLOTS,
    FIELDS,
    LONG,
    MAGIC,
    MAX_SCHEMAS,
    PREFIX_BYTES,
    UNSLOTTED,
    VALUE,
    WIRE_VERSION,
    Body,
    Kind,
    Placement,
    capacity,
    fits_a_slot,
)
from commlayer.wire.tensors import TensorMeta, as_bytes, bytes_of, is_plain, meta_of

_MOST_LAYOUTS = 1024
"""Layouts and dicts that are remembered, the oldest forgotten first: a bound on memory, far above
what an engine's steps use."""
_MOST_SEEN = 4096
"""Layouts that a lane has sent once and may see again."""
_QUIET = 32
"""A slot is taken from a schema that has sat out so many messages with payload ..."""
_EAGER = 3
"""... if another one came so often meanwhile."""


_encode = msgspec.msgpack.Encoder().encode


def encode_shape(tensors: tuple[TensorMeta, ...], placements: bytes, at_most: int) -> bytes:
    """The bytes of a body up to its value; `encode_body` completes them."""
    parts = (_encode(tensors), _encode(placements), _encode(at_most))
    return b"\x94" + b"".join(parts)


def encode_body(shape: bytes, value: bytes) -> bytes:
    """The bytes of a body."""
    return shape + _encode(value)


def encode_prefix(
    kind: int,
    flags: int,
    slot: int,
    sequence: int,
    step: int,
    schema: int,
    body: bytes,
    inline: int,
) -> bytes:
    """The bytes of a prefix, for a message with `body` and so many bytes inline."""
    fields = FIELDS.pack(
        MAGIC, WIRE_VERSION, kind, flags, slot, sequence, step, schema, len(body), inline
    )
    return fields + CHECKSUM.pack(zlib.crc32(body, zlib.crc32(fields)))


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
        self.apart = any(place in APART for place in placements)
        self.header_bytes = PREFIX_BYTES + len(self.shape)
        self.tensor_bytes = sum(sizes)


class KnownDict(NamedTuple):
    """The tensors of a dict that holds nothing else, ready to be sent, and what is known of it.

    `known` is the layout and the packed value of an equal dict that was remembered, and
    `key` what to remember it by: ``None`` for a dict that has to be packed.
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
        self._layouts: dict[Any, Layout] = {}
        self._dicts: dict[Any, tuple[Layout, bytes]] = {}

    def place(self, kind: Kind, tensors: Sequence[Tensor], at_most: int, reserved: bool) -> Layout:
        """The layout of `tensors`, which are contiguous.

        With `reserved` the only tensor travels as the message of `at_most` bytes.
        """
        key = (
            kind,
            at_most,
            reserved,
            *[(t.dtype, t.shape, t.device, self._is_on_device(t)) for t in tensors],
        )
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
            if self._is_on_device(tensor):
                placements[index] = Placement.DEVICE if size else Placement.EMPTY_ON_DEVICE
            elif size == 0:
                placements[index] = Placement.EMPTY
            elif size <= room:
                room -= size
                placements[index] = Placement.INLINE
            else:
                placements[index] = Placement.MESSAGE
        return bytes(placements)

    def recall(self, value: Mapping[str, Any]) -> KnownDict:
        """What is known of `value`, a dict of str to tensors in host memory if it has a key."""
        if type(value) is not dict:
            return KnownDict([])
        tensors = list(value.values())
        on_device = self._on_device
        parts = []
        for name, tensor in value.items():
            if type(name) is not str or not is_plain(tensor):
                return KnownDict(tensors)
            if on_device is not None and on_device(tensor):
                return KnownDict(tensors)
            parts.append((tensor.dtype, tensor.shape))
        # A tensor that occurs twice travels once: packing sees to that.
        if len(set(map(id, tensors))) != len(tensors):
            return KnownDict(tensors)
        key = (*value, *parts)
        return KnownDict(tensors, key, self._dicts.get(key))

    def remember(self, key: Any, layout: Layout, packed: bytes) -> None:
        """Remember what a dict of tensors became, for the next one with the same key."""
        _remember(self._dicts, key, (layout, packed))


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    known[key] = value
    if len(known) > _MOST_LAYOUTS:
        del known[next(iter(known))]  # the oldest: a dict keeps its order


class SendPlan(NamedTuple):
    """How the next message of a lane is sent.

    `schema` is the number that the message defines, or names if it is `named`; 0 for
    neither.  A message that names one carries the packed value only with `value`.
    `fillers` are to be sent first on the slot's tag, one byte each.
    """

    schema: int
    named: bool
    value: bool
    slot: int
    fillers: int = 0


UNPLANNED = SendPlan(0, False, True, 0)
"""For a message without payload that the lane's schemas do not know."""


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

    def head(self, sequence: int, plan: SendPlan) -> tuple[Tensor, Tensor | None]:
        """Return (header, body); `body` is None when it fits into the header message."""
        layout = self.layout
        if not plan.named:
            flags = DEFINE if plan.schema else 0
            body = encode_body(layout.shape, self.value)
        elif plan.value:
            flags, body = VALUE, self.value
        else:
            flags, body = 0, b""
        long = PREFIX_BYTES + len(body) + layout.inline > layout.room
        if long:
            flags |= LONG
        prefix = encode_prefix(
            layout.kind, flags, plan.slot, sequence, self.step, plan.schema, body, layout.inline
        )
        inline = map(bytes_of, self._inline)
        parts: tuple[bytes | memoryview, ...]
        parts = (prefix, *inline) if long else (prefix, body, *inline)
        head = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)
        if not long:
            return head, None
        return head, torch.frombuffer(bytearray(body), dtype=torch.uint8)


def plain(kind: Kind, value: bytes = b"") -> Outgoing:
    """A message without tensors."""
    return Outgoing(_PLAIN[kind], (), value)


_PLAIN = {kind: Layout(kind, (), b"", 0, -1) for kind in (Kind.CONTROL, Kind.GOODBYE)}


class _Sent:
    """A schema as its sender knows it."""

    __slots__ = ("layout", "number", "recent", "slot", "value")

    def __init__(self, layout: Layout, number: int, value: bytes) -> None:
        self.layout = layout
        self.number = number
        self.value = value
        self.slot = UNSLOTTED if layout.payload else 0
        self.recent: deque[int] = deque(maxlen=_EAGER)


class _SentSlot:
    """A slot as its sender knows it: whose it is, and when it was last used."""

    __slots__ = ("owner", "used")

    def __init__(self, owner: _Sent, used: int) -> None:
        self.owner = owner
        self.used = used


class SentSchemas:
    """Numbers and slots that the sender of a lane has given away.

    `slots` is how many the receiver receives ahead on.  Called under the order
    of the lane.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(UNSLOTTED + min(slots, EARNED_SLOTS), UNSLOTTED, -1))
        self._seen: dict[Layout, None] = {}
        self._known: dict[Layout, _Sent] = {}
        self._numbered: list[_Sent] = []
        self._next = 0
        self._slots: dict[int, _SentSlot] = {}
        self._messages = 0

    def plan(self, layout: Layout, value: bytes) -> SendPlan:
        """How the next message of the lane is to be sent."""
        known = self._known.get(layout)
        if known is None:
            known = self._define(layout, value)
            if known is None:
                return SendPlan(0, False, True, UNSLOTTED if layout.payload else 0)
            fillers = self._earn(known)
            return SendPlan(known.number, False, True, known.slot, fillers)
        fillers = self._earn(known) if known.slot == UNSLOTTED else 0
        if known.slot > UNSLOTTED:
            self._messages += 1
            self._slots[known.slot].used = self._messages
        return SendPlan(known.number, True, value != known.value, known.slot, fillers)

    def in_use(self) -> list[tuple[int, int]]:
        """Every slot that was used, and how many receives the peer has posted ahead on it."""
        return [(number, len(slot.owner.layout.payload)) for number, slot in self._slots.items()]

    def _define(self, layout: Layout, value: bytes) -> _Sent | None:
        if layout.kind is Kind.CONTROL:
            return None
        if layout not in self._seen:
            self._seen[layout] = None
            if len(self._seen) > _MOST_SEEN:
                del self._seen[next(iter(self._seen))]
            return None
        del self._seen[layout]
        if len(self._numbered) < MAX_SCHEMAS:
            known = _Sent(layout, len(self._numbered) + 1, value)
            self._numbered.append(known)
        else:
            known = _Sent(layout, self._next + 1, value)
            del self._known[self._numbered[self._next].layout]
            self._numbered[self._next] = known
            self._next = (self._next + 1) % MAX_SCHEMAS
        self._known[layout] = known
        return known

    def _earn(self, known: _Sent) -> int:
        """Give `known` a slot if it deserves one; returns the fillers that the slot needs."""
        if known.layout.kind is Kind.TENSOR or not fits_a_slot(known.layout.payload):
            return 0
        self._messages += 1
        if self._free:
            known.slot = self._free.pop()
            self._slots[known.slot] = _SentSlot(known, self._messages)
            return 0
        if not self._slots:
            return 0
        recent = known.recent
        recent.append(self._messages)
        number, slot = min(self._slots.items(), key=lambda item: item[1].used)
        quiet = self._messages - slot.used
        if quiet < _QUIET or len(recent) < _EAGER or recent[0] < slot.used:
            return 0
        loser = slot.owner
        fillers = len(loser.layout.payload)
        loser.slot = UNSLOTTED
        known.slot = number
        self._slots[number] = _SentSlot(known, self._messages)
        return fillers
