"""What this rank waits for, told in a form that other ranks can read."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from types import FrameType

from commlayer.lanes.connection import Connection
from commlayer.lanes.receiving import RecvLane
from commlayer.lanes.sending import SendLane
from commlayer.progress.operation import LaneKey, Operation
from commlayer.wire.rank_state import (
    MAX_CHANNELS,
    MAX_LANES,
    MAX_NAME,
    MAX_OPERATIONS,
    MAX_SITE,
    MAX_THREADS,
    LaneState,
    PendingOperation,
    RankState,
    ThreadState,
)
from commlayer.wire.tags import CONTROL_LANE


class Survey:
    """Looks at one connection.  Safe on any thread; takes locks for moments only.

    `steps` returns the number of broadcasts of each channel.  Receives on `may_idle`
    channels are the first to be left out where there are too many operations.
    """

    def __init__(
        self,
        connection: Connection,
        steps: Callable[[], Mapping[str, int]],
        may_idle: Collection[str] = (),
    ) -> None:
        self._connection = connection
        self._steps = steps
        self._may_idle = may_idle
        self._unclaimed: dict[LaneKey, tuple[int, float]] = {}

    def look(self) -> RankState:
        """The state of this rank now."""
        connection = self._connection
        now = connection.runtime.now()
        lanes = self._lanes(now)
        pending = self._operations(now, lanes)
        in_use = sorted(lanes.values(), key=lambda lane: not lane.unclaimed)
        named = {(view.channel, view.tag, view.peer, view.direction) for view in pending}
        in_use.sort(
            key=lambda lane: (lane.channel, lane.tag, lane.peer, lane.direction) not in named
        )
        return RankState(
            rank=connection.rank,
            host=_clip(socket.gethostname()),
            pid=os.getpid(),
            operations=tuple(pending[:MAX_OPERATIONS]),
            lanes=tuple(in_use[:MAX_LANES]),
            omitted=max(0, len(pending) - MAX_OPERATIONS) + max(0, len(in_use) - MAX_LANES),
            steps=tuple((_clip(name), n) for name, n in self._steps().items() if n)[:MAX_CHANNELS],
            held_up=connection.ledger.held_up,
            threads=_threads(),
        )

    def _operations(self, now: float, lanes: Mapping[LaneKey, LaneState]) -> list[PendingOperation]:
        by_lane: defaultdict[LaneKey, list[Operation]] = defaultdict(list)
        for operation in self._connection.ledger.pending():
            by_lane[operation.lane].append(operation)
        views = []
        for key, operations in by_lane.items():
            asked = lanes[key].count if key in lanes else len(operations)
            for number, operation in enumerate(operations, asked - len(operations)):
                known = operation.sequence
                views.append(_view(operation, known if known >= 0 else number, now))
        return sorted(views, key=lambda view: (self._idles(view), -view.age))

    def _idles(self, view: PendingOperation) -> bool:
        return view.direction == "recv" and view.channel in self._may_idle

    def _lanes(self, now: float) -> dict[LaneKey, LaneState]:
        states = {}
        for peer in self._connection.peers.values():
            for lane in peer.lanes():
                if lane.key.name == CONTROL_LANE:
                    continue
                if isinstance(lane, SendLane):
                    states[lane.key] = LaneState(*_names(lane.key), "send", lane.posted, 0, 0.0)
                else:
                    states[lane.key] = self._receives(lane, now)
        return states

    def _receives(self, lane: RecvLane, now: float) -> LaneState:
        asked = lane.asked
        unclaimed = max(0, lane.taken - asked)
        if unclaimed:
            before, since = self._unclaimed.get(lane.key, (asked, now))
            self._unclaimed[lane.key] = (asked, since if before == asked else now)
        else:
            self._unclaimed.pop(lane.key, None)
        since = self._unclaimed.get(lane.key, (0, now))[1]
        return LaneState(*_names(lane.key), "recv", asked, unclaimed, now - since)


def _names(key: LaneKey) -> tuple[str, str, int]:
    return _clip(key.channel), _clip(key.tag), key.peer


def _clip(text: str, limit: int = MAX_NAME) -> str:
    return text if len(text) <= limit else "..." + text[3 - limit :]


def _view(operation: Operation, number: int, now: float) -> PendingOperation:
    key = operation.lane
    return PendingOperation(
        kind=_clip(operation.kind),
        channel=_clip(key.channel),
        tag=_clip(key.tag),
        peer=key.peer,
        direction=key.direction,  # type: ignore[arg-type]
        number=number,
        step=operation.step,
        nbytes=operation.nbytes,
        age=now - operation.posted_at,
        awaited=operation.awaited,
        site=None if operation.site is None else _clip(operation.site, MAX_SITE),
    )


def _threads() -> tuple[ThreadState, ...]:
    """Threads of the program that are inside this library or ``torch.distributed``; the main
    thread in any case."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    states = []
    for ident, frame in sys._current_frames().items():
        name = names.get(ident, "?")
        if ident == threading.get_ident() or name.startswith("commlayer "):
            continue
        site, call = _place(frame)
        if call or ident == main:
            states.append((ident != main, ThreadState(_clip(name), _clip(site, MAX_SITE), call)))
    states.sort(key=lambda entry: entry[0])
    return tuple(state for _, state in states[:MAX_THREADS])


_PACKAGE = __name__.partition(".")[0]
_FOREIGN = "torch.distributed"
_BETWEEN = (_PACKAGE, "torch", "threading", "contextlib", "functools", "queue")


def _place(frame: FrameType | None) -> tuple[str, str]:
    """The line of the program that `frame` belongs to, and the call of a library that it made."""
    call = ""
    first = frame
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        package = module.partition(".")[0]
        if package not in _BETWEEN:
            return _line(frame), call
        name = frame.f_code.co_name
        if package == _PACKAGE:
            call = _clip(f"{_PACKAGE} {name}()")
        elif module.startswith(_FOREIGN) and name != "wrapper" and not call:
            call = _clip(f"{module}.{name}()")
        frame = frame.f_back
    return ("" if first is None else _line(first)), call


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
