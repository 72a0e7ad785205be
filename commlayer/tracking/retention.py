"""What keeps a source buffer alive, and if asked unchanged, while it is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.tracking.policies import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from commlayer.config import CommConfig


class RetentionPolicy(Policy, Protocol):
    """Decides what is posted in place of the caller's tensors.

    What `retain` returns is posted and held, together with the native works,
    until the operation is complete.  Called on the posting thread.
    """

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return one contiguous tensor of the same bytes per given tensor, in order."""
        ...


class HoldReferences:
    """Post the caller's own memory and hold a reference: alive, not immutable."""

    name = "hold_references"
    requires: Mapping[str, Collection[Any]] = {}

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


class CopyOnPost:
    """Copy tensors of up to `max_bytes` when they are posted: the caller may overwrite at once.

    Larger tensors are held as by `HoldReferences`: they must not be overwritten
    before the handle was waited.
    """

    name = "copy_on_post"
    requires: Mapping[str, Collection[Any]] = {}

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [
            tensor.clone() if tensor.numel() * tensor.element_size() <= self.max_bytes else tensor
            for tensor in tensors
        ]


def retention_policy(config: CommConfig) -> RetentionPolicy:
    """The policy that ``config.retention`` names."""
    if config.retention == HoldReferences.name:
        return HoldReferences()
    if config.retention == CopyOnPost.name:
        return CopyOnPost(config.copy_max_bytes)
    raise CommError(
        ErrorKind.CONFIG,
        "configuration",
        f"unknown retention policy {config.retention!r}",
        f"Known: {HoldReferences.name}, {CopyOnPost.name}; or supply one by hook",
    )
