"""Dumps of several ranks, joined on one clock: operations, messages between them, and a trace
for Chrome or Perfetto."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer.observe.recorder import SCHEMA, Dump, Record

_NAME = re.compile(r"(?P<connection>.+)\.rank\d+\.json")


class TracePlace(NamedTuple):
    """Where an operation is drawn: a row of a rank.  Operations of one row do not overlap."""

    rank: int
    lane: str
    row: int


class TraceEntry(NamedTuple):
    """An operation on the common clock, which starts at 0; `end` is that of the dump if open."""

    record: Record
    place: TracePlace
    start: float
    matched: float | None
    end: float
    open: bool


class Message(NamedTuple):
    """A send and the receive that took it."""

    source: TraceEntry
    target: TraceEntry


class Stretch(NamedTuple):
    """A thread of a rank has blocked for an operation."""

    rank: int
    start: float
    end: float
    what: str


class Trace(NamedTuple):
    """One connection.  Times are in seconds; `clocks` says for each rank how they were joined."""

    name: str
    dumps: tuple[Dump, ...]
    entries: tuple[TraceEntry, ...]
    messages: tuple[Message, ...]
    blocked: tuple[Stretch, ...]
    clocks: tuple[str, ...]
    duration: float


def load(folder: Path) -> dict[str, list[Dump]]:
    """The dumps in `folder`, by connection, in order of rank.

    Raises `CommError` (CONFIG) where there are none, and for one that cannot be read.
    """
    connections: defaultdict[str, list[Dump]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        match = _NAME.fullmatch(path.name)
        if match and not path.name.startswith("."):
            connections[match["connection"]].append(read(path))
    if not connections:
        raise CommError(
            ErrorKind.CONFIG,
            f"trace {folder}",
            "there is no dump of a rank in it",
            "Set trace_dir to a folder, or call dump() on every rank",
        )
    return {name: sorted(dumps, key=lambda d: d.who.rank) for name, dumps in connections.items()}


def read(path: Path) -> Dump:
    """Read what `write` wrote.  Raises `CommError` (CONFIG) for anything else."""
    operation = f"read {path}"
    cure = "Name files that commlayer has dumped"
    try:
        data = path.read_bytes()
        version = msgspec.json.decode(data, type=_Version).schema
        if version == SCHEMA:
            return msgspec.json.decode(data, type=Dump)
    except OSError as error:
        raise CommError(ErrorKind.CONFIG, operation, str(error), cure) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CommError(ErrorKind.CONFIG, operation, f"it is no dump ({error})", cure) from error
    raise CommError(
        ErrorKind.CONFIG,
        operation,
        f"it has schema {version}, this commlayer reads {SCHEMA}",
        "Read it with the version of commlayer that wrote it",
    )


class _Version(msgspec.Struct):
    schema: int


def join(name: str, dumps: Sequence[Dump]) -> Trace:
    """Put `dumps` of one connection on one clock and pair their messages."""
    offsets, clocks = _offsets(dumps)
    began = min(_times(dumps, offsets), default=0.0)
    entries = [
        entry
        for dump, offset in zip(dumps, offsets, strict=True)
        for entry in _entries(dump, offset - began)
    ]
    blocked = [
        Stretch(
            dump.who.rank,
            wait.since + offset - began,
            wait.until + offset - began,
            f"{wait.kind}, rank {wait.peer}",
        )
        for dump, offset in zip(dumps, offsets, strict=True)
        for wait in dump.blocked
    ]
    ends = [entry.end for entry in entries] + [stretch.end for stretch in blocked]
    return Trace(
        name,
        tuple(dumps),
        tuple(entries),
        tuple(_messages(entries)),
        tuple(blocked),
        clocks,
        max(ends, default=0.0),
    )


def _times(dumps: Sequence[Dump], offsets: Sequence[float]) -> Iterator[float]:
    for dump, offset in zip(dumps, offsets, strict=True):
        yield from (record.posted + offset for record in (*dump.records, *dump.open))
        yield from (wait.since + offset for wait in dump.blocked)


def _entries(dump: Dump, offset: float) -> Iterator[TraceEntry]:
    ended = dump.clocks[-1].monotonic
    rows: defaultdict[str, list[float]] = defaultdict(list)
    for record in sorted((*dump.records, *dump.open), key=lambda record: record.posted):
        open = not record.settled
        end = ended if open else record.settled
        lane = lane_name(record)
        row = _free_row(rows[lane], record.posted, end)
        matched = record.matched + offset if record.matched else None
        place = TracePlace(dump.who.rank, lane, row)
        yield TraceEntry(record, place, record.posted + offset, matched, end + offset, open)


def _free_row(ends: list[float], start: float, end: float) -> int:
    for row, before in enumerate(ends):
        if before <= start:
            ends[row] = end
            return row
    ends.append(end)
    return len(ends) - 1


def lane_name(record: Record) -> str:
    """The lane of an operation in words, as rows are labelled."""
    way = {"send": "to", "recv": "from"}.get(record.direction, "on")
    flow = record.channel if record.tag == record.channel else f"{record.channel} {record.tag}"
    return f"{way} {record.peer} · {flow}"


Key = tuple[int, int, str, str, int]
"""What names a message: source, target, channel, tag and number."""


def _key(rank: int, record: Record) -> Key | None:
    if record.sequence < 0 or record.direction not in ("send", "recv"):
        return None
    ends = (rank, record.peer) if record.direction == "send" else (record.peer, rank)
    return (*ends, record.channel, record.tag, record.sequence)


def _messages(entries: Sequence[TraceEntry]) -> Iterator[Message]:
    sends: dict[Key, TraceEntry] = {}
    for entry in entries:
        key = _key(entry.place.rank, entry.record)
        if key is not None and entry.record.direction == "send":
            sends[key] = entry
    for entry in entries:
        key = _key(entry.place.rank, entry.record)
        if key is not None and entry.record.direction == "recv" and key in sends:
            yield Message(sends[key], entry)


def _offsets(dumps: Sequence[Dump]) -> tuple[list[float], tuple[str, ...]]:
    """What to add to the monotonic clock of each dump, and how that is known.

    Ranks of one host, since one boot, share a monotonic clock.  Other hosts are
    placed by their wall clocks, then moved so that messages of both directions
    have the same least delay, if there are such.
    """
    offsets: dict[str, float] = {}
    how: dict[str, str] = {}
    first = dumps[0] if dumps else None
    for dump in dumps:
        if dump.who.boot in offsets or first is None:
            continue
        wall = _wall(dump) - _wall(first)
        offsets[dump.who.boot] = wall
        how[dump.who.boot] = "same clock" if dump is first else "wall clock"
        if dump is not first:
            shift = _shift(dumps, offsets, dump.who.boot)
            if shift is not None:
                offsets[dump.who.boot] += shift
                how[dump.who.boot] = f"wall clock, moved {1e3 * shift:+.3f} ms to fit messages"
    return [offsets[dump.who.boot] for dump in dumps], tuple(how[d.who.boot] for d in dumps)


def _wall(dump: Dump) -> float:
    """The wall clock at monotonic 0, as of the end of the dump."""
    clock = dump.clocks[-1]
    return clock.wall - clock.monotonic


def _shift(dumps: Sequence[Dump], offsets: dict[str, float], boot: str) -> float | None:
    """How to move the clock of `boot`, given those that are placed."""
    placed = [dump for dump in dumps if dump.who.boot in offsets]
    here = {dump.who.rank for dump in placed if dump.who.boot == boot}
    sent: dict[Key, float] = {}
    taken: dict[Key, float] = {}
    for dump in placed:
        for record in dump.records:
            key = _key(dump.who.rank, record)
            if key is not None and record.settled:
                offset = offsets[dump.who.boot]
                if record.direction == "send":
                    sent[key] = record.posted + offset
                else:
                    taken[key] = record.settled + offset
    delays: defaultdict[bool, list[float]] = defaultdict(list)
    for key in sent.keys() & taken.keys():
        source, target = key[0] in here, key[1] in here
        if source != target:
            delays[target].append(taken[key] - sent[key])
    if not (delays[True] and delays[False]):
        return None
    return (min(delays[False]) - min(delays[True])) / 2


def chrome(trace: Trace) -> dict[str, Any]:
    """`trace` in the format of Chrome's and Perfetto's viewers; times in microseconds."""
    events: list[dict[str, Any]] = []
    threads: dict[TracePlace, int] = {}
    for dump in trace.dumps:
        rank = dump.who.rank
        where = f"rank {rank} ({dump.who.backend}, pid {dump.who.pid} on {dump.who.host})"
        events.append(_meta("process_name", rank, 0, where))
        events.append(_meta("thread_name", rank, 0, "blocked in a wait"))
        places = sorted({e.place for e in trace.entries if e.place.rank == rank})
        for number, place in enumerate(places, 1):
            threads[place] = number
            label = place.lane if not place.row else f"{place.lane} ({place.row + 1})"
            events.append(_meta("thread_name", rank, number, label))
            events.append(
                {
                    "ph": "M",
                    "name": "thread_sort_index",
                    "pid": rank,
                    "tid": number,
                    "args": {"sort_index": number},
                }
            )
    for stretch in trace.blocked:
        events.append(_complete(stretch.what, "wait", stretch.rank, 0, stretch.start, stretch.end))
    for entry in trace.entries:
        record, rank, thread = entry.record, entry.place.rank, threads[entry.place]
        event = _complete(record.kind, record.direction, rank, thread, entry.start, entry.end)
        event["args"] = {
            "number": record.sequence,
            "bytes": record.nbytes,
            **({"broadcast": record.step} if record.step >= 0 else {}),
            **({"matched_ms": 1e3 * (entry.matched - entry.start)} if entry.matched else {}),
            **({"error": record.error} if record.error else {}),
            **({"pending": True} if entry.open else {}),
            **({"posted_at": record.site} if record.site else {}),
        }
        events.append(event)
    for number, (source, target) in enumerate(trace.messages):
        ends = [("s", source, source.start), ("f", target, target.end)]
        for phase, entry, time in ends:
            events.append(
                {
                    "ph": phase,
                    "name": "message",
                    "cat": "message",
                    "id": number,
                    "pid": entry.place.rank,
                    "tid": threads[entry.place],
                    "ts": 1e6 * time,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(name: str, rank: int, thread: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": {"name": value}}


def _complete(
    name: str, category: str, rank: int, thread: int, start: float, end: float
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": thread,
        "ts": 1e6 * start,
        "dur": 1e6 * max(0.0, end - start),
    }
