"""Messages as a sender writes them, for tests of what a receiver makes of them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from commlayer.wire.frame import LOOSE, Kind
from commlayer.wire.outgoing import Layouts, Outgoing


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
    head, body = out.head(sequence, slot=LOOSE if out.payload else 0)
    return [head, *([] if body is None else [body]), *out.payload]
