"""Schemas of one lane: shapes that repeat are named, and their payload is received ahead.

The sender decides: a layout that comes a second time gets a number, with which
later messages name it, and if it has payload of moderate size one of a few
*slots*.  A slot has a native tag of its own on which only payload of this one
schema travels, so that the receiver can post the receives of the next message
before its header is here.  A posted receive cannot be withdrawn: when a slot
changes hands, and at the end, the sender completes what was posted ahead by
fillers of one byte, which fit every receive.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from commlayer.errors import About
from commlayer.wire.frame import (
    DEFINE,
    EARNED_SLOTS,
    LOOSE,
    MAX_SCHEMAS,
    SLOT_BYTES,
    SLOT_TENSORS,
    VALUE,
    Body,
    Kind,
    Placement,
    Prefix,
    protocol_error,
)
from commlayer.wire.message import Layout
from commlayer.wire.tensors import DTYPES
from commlayer.wire.values import Parsed

_MOST_SEEN = 4096
_QUIET = 32
"""A slot is taken from a schema that has sat out so many messages with payload ..."""
_EAGER = 3
"""... if another one came so often meanwhile."""


class Stamp(NamedTuple):
    """How a message is to be sent.

    `schema` is 0 for one that is neither defined nor named.  `fillers` are to be
    sent first on the slot's tag, one byte each.
    """

    schema: int
    named: bool
    value: bool
    slot: int
    fillers: int = 0


def fits_a_slot(sizes: Sequence[int]) -> bool:
    """Whether payload of these sizes in bytes may be received ahead, for both ends."""
    return 0 < len(sizes) <= SLOT_TENSORS and sum(sizes) <= SLOT_BYTES


class _Sent:
    """A schema as its sender knows it."""

    __slots__ = ("layout", "number", "recent", "slot", "value")

    def __init__(self, layout: Layout, number: int, value: bytes) -> None:
        self.layout = layout
        self.number = number
        self.value = value
        self.slot = LOOSE if layout.payload else 0
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
        self._free = list(range(LOOSE + min(slots, EARNED_SLOTS), LOOSE, -1))
        self._seen: OrderedDict[Layout, None] = OrderedDict()
        self._known: dict[Layout, _Sent] = {}
        self._numbered: list[_Sent] = []
        self._next = 0
        self._slots: dict[int, _SentSlot] = {}
        self._messages = 0

    def stamp(self, layout: Layout, value: bytes) -> Stamp:
        """How the next message of the lane is to be sent."""
        known = self._known.get(layout)
        if known is None:
            known = self._define(layout, value)
            if known is None:
                return Stamp(0, False, True, LOOSE if layout.payload else 0)
            fillers = self._earn(known)
            return Stamp(known.number, False, True, known.slot, fillers)
        fillers = self._earn(known) if known.slot == LOOSE else 0
        if known.slot > LOOSE:
            self._messages += 1
            self._slots[known.slot].used = self._messages
        return Stamp(known.number, True, value != known.value, known.slot, fillers)

    def in_use(self) -> list[tuple[int, int]]:
        """Every slot that was used, and how many receives the peer has posted ahead on it."""
        return [(number, len(slot.owner.layout.payload)) for number, slot in self._slots.items()]

    def _define(self, layout: Layout, value: bytes) -> _Sent | None:
        if layout.kind is Kind.CONTROL:
            return None
        if layout not in self._seen:
            self._seen[layout] = None
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
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
        loser.slot = LOOSE
        known.slot = number
        self._slots[number] = _SentSlot(known, self._messages)
        return fillers


class Schema:
    """What a header says of its tensors and value, checked.

    `nbytes` is the size of all tensors, `inline` of those in the header message.
    `parts` are shape, dtype, size in bytes and placement of each tensor, `payload`
    the indices of those that are messages of their own.  `reusable` is the parsed
    value where it can be built any number of times.
    """

    __slots__ = (
        "body",
        "inline",
        "kind",
        "nbytes",
        "on_device",
        "parts",
        "payload",
        "reserved",
        "reusable",
    )

    def __init__(self, kind: Kind, body: Body, reusable: Parsed | None) -> None:
        placements = body.placements
        self.kind = kind
        self.body = body
        self.reusable = reusable
        self.parts = [
            (meta.shape, DTYPES[meta.dtype], meta.nbytes, place)
            for meta, place in zip(body.tensors, placements, strict=True)
        ]
        self.nbytes = sum(meta.nbytes for meta in body.tensors)
        self.inline = body.inline_bytes
        self.payload = [i for i, place in enumerate(placements) if place == Placement.MESSAGE]
        self.on_device = any(place >= Placement.DEVICE for place in placements)
        self.reserved = Placement.RESERVED in placements

    def allocate(self) -> list[Tensor | None] | None:
        """New tensors for what travels in the header, and for what is empty.

        ``None`` where there is no memory for them.
        """
        try:
            with torch.inference_mode(False):
                return [
                    torch.empty(shape, dtype=dtype, device="cpu")
                    if place < Placement.MESSAGE
                    else None
                    for shape, dtype, _, place in self.parts
                ]
        except (RuntimeError, MemoryError):
            return None

    @property
    def may_have_slot(self) -> bool:
        """Whether its payload may be received ahead."""
        return fits_a_slot([self.parts[index][2] for index in self.payload])


class ReceivedSchemas:
    """Numbers that the peer has given."""

    def __init__(self) -> None:
        self._known: dict[int, Schema] = {}

    def define(self, number: int, schema: Schema) -> None:
        self._known[number] = schema

    def named(self, prefix: Prefix, where: About) -> Schema:
        """The schema that `prefix` names; raises `CommError` (PROTOCOL) unless it fits."""
        schema = self._known.get(prefix.schema)
        if schema is None:
            raise protocol_error(where, f"the header names schema {prefix.schema}, not defined")
        if schema.kind is not prefix.kind or schema.inline != prefix.inline:
            raise protocol_error(where, f"the header contradicts schema {prefix.schema}")
        if bool(prefix.body) and not prefix.flags & VALUE:
            raise protocol_error(where, "the header has a body and names a schema")
        return schema


def is_named(prefix: Prefix) -> bool:
    """Whether a message names a schema that was defined before."""
    return bool(prefix.schema) and not prefix.flags & DEFINE
