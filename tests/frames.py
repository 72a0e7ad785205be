"""Messages as a sender writes them, for tests of what a receiver makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commlayer.config import CommConfig
from commlayer.wire.frame import UNSLOTTED, Kind
from commlayer.wire.message import Layouts, Outgoing, SendPlan
from commlayer.wire.values import pack


def outgoing(
    kind: Kind, tensors: Sequence[Tensor], value: bytes, inline_bytes: int, step: int = -1
) -> Outgoing:
    layout = Layouts(inline_bytes, None).place(kind, tensors, -1, False)
    return Outgoing(layout, tensors, value, step)


def messages(
    kind: Kind,
    tensors: Sequence[Tensor],
    value: bytes,
    inline_bytes: int,
    sequence: int = 0,
    step: int = -1,
) -> list[Tensor]:
    """The native messages, in order: header, long body, payload."""
    out = outgoing(kind, tensors, value, inline_bytes, step)
    head, body = out.head(sequence, SendPlan(0, False, True, UNSLOTTED if out.payload else 0))
    return [head, *([] if body is None else [body]), *out.payload]


def framed(
    value: Any,
    sequence: int = 0,
    *,
    inline_bytes: int,
    kind: Kind = Kind.OBJECT,
    **limits: Any,
) -> list[bytes]:
    """The native messages of a value, as bytes; `limits` are those of its sender."""
    packed, tensors = pack(value, CommConfig(**limits), "")
    return [bytes(m.tolist()) for m in messages(kind, tensors, packed, inline_bytes, sequence)]


def patched(message: bytes, at: int, data: bytes) -> bytes:
    return message[:at] + data + message[at + len(data) :]
