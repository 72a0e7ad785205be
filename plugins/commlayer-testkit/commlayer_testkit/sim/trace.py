"""One run as a Chrome trace (chrome://tracing, Perfetto) of virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


def trace_events(log: Sequence[tuple[int, float, str, str, str]]) -> dict[str, Any]:
    """The Trace Event Format of a `Run.log`.

    A step lasts one microsecond, so that steps at one virtual time can be told
    apart; jumps of the clock show as gaps.  Each task, lane and stream is a row.
    """
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for step, now, who, what, detail in log:
        row = rows.setdefault(who, len(rows))
        events.append(
            {
                "name": what,
                "ph": "X",
                "ts": now * 1e6 + step,
                "dur": 1,
                "pid": 0,
                "tid": row,
                "args": {"detail": detail, "step": step, "virtual seconds": now},
            }
        )
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": who}}
        for who, row in rows.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def write_trace(path: str | Path, log: Sequence[tuple[int, float, str, str, str]]) -> None:
    """Write `trace_events` of `log` to `path`."""
    Path(path).write_bytes(msgspec.json.encode(trace_events(log)))
