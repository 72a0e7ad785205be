"""What all lanes of one connection share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import LaneKey
from commlayer.progress.runtime import Runtime
from commlayer.wire.tags import CONTROL_LANE
from commlayer.wire.tensors import Limits


@dataclass(frozen=True)
class Ahead:
    """What a rank receives ahead of its use, on every lane: headers, and slots of payload."""

    headers: int
    slots: int

    def on(self, key: LaneKey) -> Ahead:
        """As it is on lane `key`: the library's own lane has one header and no payload."""
        return Ahead(1, 0) if key.name == CONTROL_LANE else self


@dataclass(frozen=True)
class LaneContext:
    """What all lanes of one connection share.

    `serial` lanes have one native operation outstanding at a time and post from
    their driver, never from the caller.  `ahead` is what this rank receives
    ahead, `peers_ahead` what each other rank does.  `peer_failed` is told of a
    native error, `lane_broken` of a message that cannot be trusted.
    """

    runtime: Runtime
    ledger: Ledger
    progress: ProgressEngine
    limits: Limits
    inline_bytes: int
    unclaimed: int
    serial: bool
    ahead: Ahead
    peers_ahead: dict[int, Ahead]
    peer_failed: Callable[[int, Exception], CommError]
    lane_broken: Callable[[LaneKey, CommError], None]
    device: DeviceSide | None = None


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
