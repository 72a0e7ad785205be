"""What a lane is asked for."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from commlayer.errors import CommError
from commlayer.progress.operation import Operation
from commlayer.wire.reader import Incoming


class Claim(Protocol):
    """A receive that was asked for.  A lane hands it the next message, and no other."""

    @property
    def operation(self) -> Operation: ...

    @property
    def at_most(self) -> int:
        """The size in bytes that was declared for its tensor; -1 if none was."""
        ...

    @property
    def copies(self) -> bool:
        """Whether `value` copies a tensor of the message into memory of the caller's."""
        ...

    def leaves(self, incoming: Incoming) -> bool:
        """Whether it refuses `incoming` and leaves it to the next claim."""
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
