"""What is in flight at one moment, as immutable values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation


class OperationView(msgspec.Struct, frozen=True):
    """What a snapshot says of one operation.  `age` is in seconds since the post."""

    kind: str
    channel: str
    peer: int
    direction: str
    tag: str
    sequence: int
    nbytes: int
    age: float
    state: Literal["pending", "complete", "failed"]
    site: str | None


class Snapshot(msgspec.Struct, frozen=True):
    """The ledger at one moment.

    `operations` are all that are not yet released, oldest first per lane.
    `sends` and `bytes` are what the bounds count; the peaks are the largest
    values since the communicator was made.  `quarantined` are operations that
    were given up while the transport still holds their buffers.
    """

    operations: tuple[OperationView, ...]
    sends: int
    bytes: int
    peak_sends: int
    peak_bytes: int
    quarantined: tuple[OperationView, ...]


def view(operation: Operation, now: float) -> OperationView:
    """What a snapshot at `now` says of `operation`."""
    if not operation.settled:
        state: Literal["pending", "complete", "failed"] = "pending"
    else:
        state = "failed" if operation.error is not None else "complete"
    return OperationView(
        kind=operation.kind,
        channel=operation.lane.channel,
        peer=operation.lane.peer,
        direction=operation.lane.direction,
        tag=operation.lane.tag,
        sequence=operation.sequence,
        nbytes=operation.nbytes,
        age=now - operation.posted_at,
        state=state,
        site=operation.site,
    )


def full(operation: Operation, sends: Sequence[Operation], held: str, now: float) -> CommError:
    """The error of an `operation` for which the bounds leave no room beside `sends`."""
    oldest = min(sends, key=lambda o: o.posted_at, default=None)
    age = f", for {now - oldest.posted_at:.1f} s" if oldest else ""
    cause = f"{held}; the oldest is {oldest.describe()}{age}" if oldest else held
    return CommError(
        ErrorKind.FULL,
        operation.describe(),
        cause,
        "See why its receiver does not receive, or raise max_inflight_ops, "
        "max_inflight_bytes or full_timeout",
    )
