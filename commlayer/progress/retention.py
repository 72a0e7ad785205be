"""What keeps a source buffer alive, and if asked unchanged, while it is sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.policies import Policy
from commlayer.semantics import WaitBlocks
from commlayer.wire.tensors import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from commlayer.config import CommConfig


class DeviceHold(str, Enum):
    """How long the library refers to what the device part of a send reads."""

    EVENT = "event"
    """Until the device event that follows it."""
    COMPLETION = "completion"
    """Until the whole operation is complete, host part included."""


class RetentionPolicy(Policy, Protocol):
    """Decides what is posted in place of the caller's tensors.

    What `retain` returns is posted and held, together with the native works,
    until the operation is complete.  Called on the posting thread.  A policy that
    has an attribute `device_hold` (`DeviceHold`) holds device memory as long as
    that says.
    """

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return one contiguous tensor of the same bytes per given tensor, in order."""
        ...


class HoldReferences:
    """Post the caller's own memory and hold a reference: alive, not immutable."""

    name = "hold_references"
    requires: Mapping[str, Collection[Any]] = {}
    device_hold = DeviceHold.COMPLETION

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


class HoldUntilEvent(HoldReferences):
    """As `HoldReferences`, but let go of device memory as soon as its event has passed.

    The header of the message may then still be on its way.
    """

    name = "hold_until_event"
    requires: Mapping[str, Collection[Any]] = {"wait_blocks": {WaitBlocks.STREAM}}
    device_hold = DeviceHold.EVENT


class CopyOnPost:
    """Copy tensors when they are posted: the caller may overwrite them at once.

    A tensor of more than `max_bytes` (0: no bound) is refused (UNSUPPORTED).
    """

    name = "copy_on_post"
    requires: Mapping[str, Collection[Any]] = {}
    device_hold = DeviceHold.COMPLETION

    def __init__(self, max_bytes: int = 0) -> None:
        self.max_bytes = max_bytes

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        # Held instead of copied, it would be overwritten by a caller who was promised a copy.
        if 0 < self.max_bytes < largest:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                f"retention = {self.name!r}",
                f"a tensor of {largest} bytes exceeds copy_max_bytes = {self.max_bytes}",
                "Raise copy_max_bytes, or set it to 0 for tensors of any size",
            )
        return [_copied(tensor) for tensor in tensors]


def _copied(tensor: Tensor) -> Tensor:
    """Copies bytes, since torch 2.8 cannot copy every dtype; `tensor` is contiguous."""
    data = as_bytes(tensor).clone()
    return data.view(tensor.dtype).view(tensor.shape)


_PLAIN = (HoldReferences, HoldUntilEvent)


def retention_policy(config: CommConfig) -> RetentionPolicy:
    """The policy that ``config.retention`` names."""
    for policy in _PLAIN:
        if policy.name == config.retention:
            return policy()
    if config.retention == CopyOnPost.name:
        return CopyOnPost(config.copy_max_bytes)
    raise CommError(
        ErrorKind.CONFIG,
        "configuration",
        f"unknown retention policy {config.retention!r}",
        f"Known: {', '.join(known.name for known in (*_PLAIN, CopyOnPost))}; or supply one by hook",
    )
