"""A trace as one static page: ranks and lanes as rows, messages as arrows."""

from __future__ import annotations

import html
from importlib.resources import files
from typing import Any

import msgspec

from commlayer_tools.trace import Trace, TracePlace

_TEMPLATE = "timeline.html"


def page(trace: Trace) -> str:
    """An HTML document without any resource of another place."""
    template = files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    data = msgspec.json.encode(_data(trace)).decode().replace("<", "\\u003c")
    title = html.escape(f"{trace.name}: {len(trace.dumps)} ranks")
    return template.replace("__TITLE__", title).replace("__DATA__", data)


def _data(trace: Trace) -> dict[str, Any]:
    """What the page draws; times in seconds from the first post."""
    numbers: dict[TracePlace, int] = {}
    ranks = []
    for dump, clock in zip(trace.dumps, trace.clocks, strict=True):
        rank = dump.who.rank
        places = sorted({entry.place for entry in trace.entries if entry.place.rank == rank})
        for place in places:
            numbers[place] = len(numbers)
        ranks.append(
            {
                "rank": rank,
                "host": dump.who.host,
                "pid": dump.who.pid,
                "backend": dump.who.backend,
                "clock": clock,
                "reason": dump.reason,
                "forgotten": dump.forgotten,
                "report": dump.report,
                "rows": [[numbers[place], place.lane, place.row] for place in places],
                "blocked": [
                    [each.start, each.end, each.what] for each in trace.blocked if each.rank == rank
                ],
            }
        )
    index = {id(entry): number for number, entry in enumerate(trace.entries)}
    return {
        "name": trace.name,
        "size": trace.dumps[0].who.world_size if trace.dumps else 0,
        "duration": trace.duration,
        "ranks": ranks,
        "operations": [
            {
                "row": numbers[entry.place],
                "rank": entry.place.rank,
                "start": entry.start,
                "end": entry.end,
                "open": entry.open,
                "kind": entry.record.kind,
                "way": entry.record.direction,
                "lane": entry.place.lane,
                "number": entry.record.sequence,
                "step": entry.record.step,
                "bytes": entry.record.nbytes,
                "error": entry.record.error,
                "site": entry.record.site,
                "matched": entry.matched,
                "released": entry.record.released - entry.record.settled
                if entry.record.released
                else None,
            }
            for entry in trace.entries
        ],
        "messages": [[index[id(m.source)], index[id(m.target)]] for m in trace.messages],
    }
