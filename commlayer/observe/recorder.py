"""The flight recorder: the last operations of a rank, written down when something fails."""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from commlayer.errors import ErrorKind
from commlayer.observe.spans import Span
from commlayer.progress.operation import Operation

SCHEMA = 1
"""Version of the files; a reader refuses others."""

LOCAL_SIZE = 4096
"""How many operations are kept where `trace_dir` is set and `recorder_size` is not."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """An operation as it is written.  Times are of the monotonic clock, in seconds, 0 if unknown.

    `sequence` is the number of its message on the lane, -1 while it is not known,
    and `step` that of the broadcast on its channel.
    """

    kind: str
    channel: str
    tag: str
    peer: int
    direction: str
    sequence: int
    nbytes: int
    posted: float
    matched: float = 0.0
    settled: float = 0.0
    released: float = 0.0
    step: int = -1
    error: str = ""
    site: str = ""


class Blocked(msgspec.Struct, frozen=True):
    """A thread has blocked for an operation, between two times of the monotonic clock."""

    kind: str
    peer: int
    since: float
    until: float


class Clock(msgspec.Struct, frozen=True):
    """One moment on two clocks, in seconds.

    The monotonic clock is that of the host since it was booted, the same in all
    its processes; between hosts only the wall clock compares, as far as it is
    set.
    """

    monotonic: float
    wall: float

    @staticmethod
    def read() -> Clock:
        """Both clocks; the wall clock as of the middle of two looks at the other."""
        before = time.monotonic()
        wall = time.time()
        return Clock((before + time.monotonic()) / 2, wall)


class Identity(msgspec.Struct, frozen=True):
    """Whose records they are."""

    name: str
    rank: int
    world_size: int
    backend: str
    host: str
    boot: str
    pid: int

    @staticmethod
    def here(name: str, rank: int, world_size: int, backend: str) -> Identity:
        return Identity(name, rank, world_size, backend, socket.gethostname(), _boot(), os.getpid())


class Dump(msgspec.Struct, frozen=True):
    """What one rank has written: `records` that are over, oldest first, and those still `open`.

    `forgotten` operations were over before the oldest of `records` and made room.
    `report` is the text of the last stall report.
    """

    schema: int
    who: Identity
    reason: str
    clocks: tuple[Clock, ...]
    forgotten: int
    records: tuple[Record, ...]
    open: tuple[Record, ...]
    blocked: tuple[Blocked, ...]
    report: str = ""


class Recorder:
    """Keeps the last `size` operations and the last `size` waits.  A sink of `Spans`.

    `failed` is called under the ledger's lock when an operation has ended in a
    way that should not happen.
    """

    def __init__(self, size: int, who: Identity, failed: Callable[[str], None]) -> None:
        self._who = who
        self._failed = failed
        self._spans: deque[Span] = deque(maxlen=size)
        self._waits: deque[tuple[str, int, float, float]] = deque(maxlen=size)
        self._count = 0
        self._began = Clock.read()

    def finished(self, span: Span) -> None:
        self._count += 1
        self._spans.append(span)
        if span.error in _GRAVE:
            self._failed(span.error)

    def waited(self, operation: Operation, since: float, until: float) -> None:
        self._waits.append((operation.kind, operation.lane.peer, since, until))

    def dump(self, open: list[Span], reason: str, report: str = "") -> Dump:
        """Everything that is remembered, and the operations that are not over."""
        spans = list(self._spans)
        return Dump(
            schema=SCHEMA,
            who=self._who,
            reason=reason,
            clocks=(self._began, Clock.read()),
            forgotten=self._count - len(spans),
            records=tuple(map(_record, spans)),
            open=tuple(map(_record, open)),
            blocked=tuple(Blocked(*wait) for wait in list(self._waits)),
            report=report,
        )


_GRAVE = {ErrorKind.PEER_LOST.value, ErrorKind.PROTOCOL.value, ErrorKind.LIFETIME.value}
_connections: Counter[str] = Counter()


def _record(span: Span) -> Record:
    return Record(
        kind=span.kind,
        channel=span.lane.channel,
        tag=span.lane.tag,
        peer=span.lane.peer,
        direction=span.lane.direction,
        sequence=span.sequence,
        nbytes=span.nbytes,
        posted=span.posted,
        matched=span.matched,
        settled=span.settled,
        released=span.released,
        step=span.step,
        error=span.error,
        site=span.site or "",
    )


def _boot() -> str:
    """What tells one boot of one host from another: monotonic clocks compare within one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def file_name(name: str, rank: int) -> str:
    """The file of one connection of this process, the same for every dump of it.

    A second connection of the same name gets another; ranks connect in the same
    order, so their files agree.
    """
    _connections[name] += 1
    number = _connections[name]
    stem = re.sub(r"[^A-Za-z0-9_-]", "_", name) + (f".{number}" if number > 1 else "")
    return f"{stem}.rank{rank}.json"


def write(dump: Dump, path: Path) -> None:
    """Write `dump` to `path` in one step; folders are made.  Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.encode(dump))
    beside.replace(path)
