"""A message whose header is here, and who asked for it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from commlayer.errors import CommError
from commlayer.progress.operation import Operation
from commlayer.wire.frame import Body, Kind, Placement, Prefix
from commlayer.wire.schemas import Schema
from commlayer.wire.values import Parsed


class Incoming:
    """A message whose header was checked.

    `tensors` are those that are here: payload that a claim received into its
    own memory stays ``None``.
    """

    __slots__ = ("lost_bytes", "parsed", "schema", "sequence", "slot", "step", "tensors")

    def __init__(self, prefix: Prefix, schema: Schema, parsed: Parsed | None) -> None:
        self.schema = schema
        self.sequence = prefix.sequence
        self.slot = prefix.slot
        self.step = prefix.step
        self.parsed = parsed
        self.tensors: list[Tensor | None] = []
        self.lost_bytes = 0
        """Payload for which this rank had no memory."""

    @property
    def kind(self) -> Kind:
        return self.schema.kind

    @property
    def body(self) -> Body:
        return self.schema.body

    def placed(self, where: Placement) -> list[int]:
        """Indices of the tensors that travel as `where` says."""
        return [index for index, place in enumerate(self.body.placements) if place == where]

    @property
    def on_device(self) -> bool:
        """Whether it has payload on the device transport."""
        return self.schema.on_device


class Claim(Protocol):
    """A receive that was asked for."""

    @property
    def operation(self) -> Operation: ...

    @property
    def at_most(self) -> int:
        """The size in bytes that was declared for its tensor; -1 if none was."""
        ...

    def refusal(self, incoming: Incoming) -> CommError | None:
        """Why `incoming` is not what was asked for, or ``None``."""
        ...

    def buffer(self, incoming: Incoming, index: int) -> Tensor | None:
        """Memory (1-D uint8, of exactly its size) to receive tensor `index` into, or ``None``."""
        ...

    def value(self, incoming: Incoming) -> Any:
        """What the receive yields, all tensors of `incoming` being here."""
        ...
