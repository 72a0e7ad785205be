"""When completed operations are noticed and their buffers released."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation
from commlayer.progress.policies import Policy
from commlayer.semantics import Completion, WaitBlocks

if TYPE_CHECKING:
    from commlayer.config import CommConfig


class ReapingPolicy(Policy, Protocol):
    """Decides which operations of a lane may be released.

    `background` says whether the ledger asks whenever an operation completes;
    otherwise it asks inside calls on the communicator only.
    """

    @property
    def background(self) -> bool:
        """Whether the ledger asks also when no call is made."""
        ...

    def reapable(self, entries: Sequence[Operation]) -> int:
        """How many of `entries` (one lane, oldest first) may be released, from the front.

        Called under the ledger's lock; must not block.  Where this raises, nothing is
        released, and the error is logged.
        """
        ...


class FifoReaping:
    """Oldest first, stop at the first operation that is not known to be complete."""

    name = "fifo"
    background = False
    requires: Mapping[str, Collection[Any]] = {}

    def reapable(self, entries: Sequence[Operation]) -> int:
        count = 0
        for entry in entries:
            if not entry.settled:
                break
            count += 1
        return count


class BackgroundReaping(FifoReaping):
    """As `FifoReaping`, and also when the caller makes no call at all."""

    name = "background"
    background = True


class GateOnDevice:
    """As `BackgroundReaping`, and a send whose payload is all on a device when that has ended.

    Its header may then not be known to be complete; that the device part was
    matched says that the peer has it.  The header's lane waits for it all the same.
    """

    name = "gate_on_device"
    background = True
    requires: Mapping[str, Collection[Any]] = {
        "wait_blocks": {WaitBlocks.STREAM},
        "completion": {Completion.MATCHED, Completion.DELIVERED},
    }

    def reapable(self, entries: Sequence[Operation]) -> int:
        count = 0
        for entry in entries:
            part = entry.device
            if not (entry.settled or (part is not None and part.done and not part.host_payload)):
                break
            count += 1
        return count


_POLICIES = (BackgroundReaping, FifoReaping, GateOnDevice)


def reaping_policy(config: CommConfig) -> ReapingPolicy:
    """The policy that ``config.reaping`` names."""
    for policy in _POLICIES:
        if policy.name == config.reaping:
            return policy()
    raise CommError(
        ErrorKind.CONFIG,
        "configuration",
        f"unknown reaping policy {config.reaping!r}",
        f"Known: {', '.join(policy.name for policy in _POLICIES)}; or supply one by hook",
    )
