"""What all lanes of one connection share, and what a lane needs of the peer it belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from commlayer.backend import Endpoint
from commlayer.config import CommConfig
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import LaneKey
from commlayer.progress.runtime import Runtime
from commlayer.wire.tags import CONTROL_LANE


@dataclass(frozen=True)
class Prefetch:
    """What a rank receives ahead of its use, on every lane: headers, and slots of payload."""

    headers: int
    slots: int

    def on(self, key: LaneKey) -> Prefetch:
        """As it is on lane `key`: the library's own lane, and those of a caller's tags, have one
        header and no payload."""
        return Prefetch(1, 0) if key.name == CONTROL_LANE or key.numbered else self


@dataclass(frozen=True)
class LaneContext:
    """What all lanes of one connection share.

    `serial` lanes have one native operation outstanding at a time and post from their
    driver, never from the caller.  `prefetch` is what this rank receives ahead.
    """

    endpoint: Endpoint
    runtime: Runtime
    ledger: Ledger
    progress: ProgressEngine
    config: CommConfig
    serial: bool
    prefetch: Prefetch
    device: DeviceSide | None = None


class LaneOwner(Protocol):
    """The peer at the other end of a lane, as the lane sees it."""

    @property
    def prefetch(self) -> Prefetch:
        """What the peer receives ahead."""
        ...

    @property
    def error(self) -> CommError | None:
        """Why nothing more comes from the peer; ``None`` while it is open."""
        ...

    def transport_failed(self, cause: Exception) -> CommError:
        """Report the failure of a native operation: every lane with the peer fails with it.

        Returns the error for the operation.
        """
        ...

    def lane_broken(self, key: LaneKey, error: CommError) -> None:
        """Report a message that cannot be trusted: nothing more is received on its lane."""
        ...


def driver_died(name: str, error: BaseException) -> CommError:
    """The error of a lane whose driver raised `error`."""
    failure = CommError(
        ErrorKind.PROTOCOL,
        f"lane {name}",
        f"the task that drives it died ({type(error).__name__}: {error})",
        "This is a defect of commlayer or of the plugin; see the log",
    )
    failure.__cause__ = error
    return failure
