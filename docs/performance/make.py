"""Writes the generated parts of docs/performance.md from results.json.  ``make performance``.

With ``--check`` nothing is written; the exit code says whether the page is up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from commlayer_bench.compare import Lookup, Ratio
from commlayer_bench.records import Machine, Results, decode
from commlayer_bench.tables import Cell, Table, tables
from commlayer_bench.workloads import WORKLOADS
from commlayer_bench.workloads.observing import OFF, ON
from msgspec.structs import replace

HERE = Path(__file__).parent
PAGE = HERE.parent / "performance.md"
OURS = ("commlayer direct", "commlayer")
BASES = ("plain", "common", "vllm")


class Aim(NamedTuple):
    """What was aimed at for the mode ``direct``, as ratios to each of `BASES`."""

    work: str
    workload: str
    case: str
    metric: str
    aims: tuple[float | None, float | None, float | None]


AIMS = (
    Aim("dict of 2 × 1 KiB and a reply", "dict", "2 × 1 KiB", "latency", (0.85, 0.45, 0.4)),
    Aim("the same, 2 × 64 KiB", "dict", "2 × 64 KiB", "latency", (1.0, 0.7, 0.45)),
    Aim("the same, 2 × 1 MiB", "dict", "2 × 1 MiB", "latency", (1.0, 0.75, 0.6)),
    Aim("the same, 2 × 16 MiB", "dict", "2 × 16 MiB", "latency", (1.02, 0.95, 0.93)),
    Aim("caller's post of 2 × 64 KiB", "post", "2 × 64 KiB", "post", (1.3, 0.5, 0.5)),
    Aim(
        "receive of 2 × 64 KiB posted, 20 ms later waited: wait and result",
        "late", "2 × 64 KiB", "wait", (1.0, 0.6, 0.6),
    ),
    Aim("the same, time lost in post, wait and result", "late", "2 × 64 KiB", "lost", (None,) * 3),
)  # fmt: skip


def main(arguments: list[str]) -> int:
    results = decode((HERE / "results.json").read_bytes())
    page = PAGE.read_text("utf-8")
    renewed = render(page, results)
    if "--check" in arguments:
        return int(renewed != page)
    PAGE.write_text(renewed, "utf-8")
    return 0


def render(page: str, results: Results) -> str:
    """`page` with every generated block made anew."""
    for name, block in BLOCKS.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text = f"{begin}\n{block(results)}\n{end}"
        if len(pattern.findall(page)) != 1:
            raise ValueError(f"the page does not have one block {name!r}")
        page = pattern.sub(text.replace("\\", r"\\"), page)
    return page


def aims(results: Results) -> str:
    """What was reached, beside what was aimed at."""
    lookup = Lookup(results)
    lines = []
    for aim in AIMS:
        for mode in OURS:
            cells = []
            for base, target in zip(BASES, aim.aims, strict=True):
                found = lookup.ratio(aim.workload, aim.case, aim.metric, mode, base)
                goal = f"; aim {target:g}" if target and mode == OURS[0] else ""
                cells.append(f"{_ratio(found)}{goal}" if found else "")
            if any(cells):
                lines.append([aim.work, _mode(mode), *cells])
    for mode in OURS:
        many = lookup.get("in_flight", "10,000", "operation", mode)
        few = lookup.get("in_flight", "10", "operation", mode)
        if many and few:
            goal = "; aim 1.2" if mode == OURS[0] else ""
            work = "10,000 in flight, per operation, against 10 in flight"
            lines.append([work, _mode(mode), f"{many.median / few.median:.2f}{goal}", "", ""])
        step = lookup.get("overlap", "2 × 1 MiB, device", "step", mode)
        if step:
            goal = "; aim 1.1" if mode == OURS[0] else ""
            low, high = step.quartiles
            work = "pipelined decode, a step against its compute, 2 × 1 MiB"
            cell = f"**{step.median:.2f}** ({low:.2f}–{high:.2f}){goal}"
            lines.append([work, _mode(mode), cell, "", ""])
        handle = lookup.get("handle", "completion polled", "handle", mode)
        if handle:
            goal = "; aim 15 µs" if mode == OURS[0] else ""
            work = "handle made, completed and reaped on a null backend"
            lines.append([work, _mode(mode), f"{handle.median * 1e6:.1f} µs{goal}", "", ""])
    for mode, wait in zip(OURS, ("direct", "safe"), strict=True):
        found = lookup.ratio("observing", f"2 × 1 KiB, {wait}", "latency", ON, OFF)
        if found:
            goal = "; aim 1.1" if mode == OURS[0] else ""
            work = "dict of 2 × 1 KiB with everything on, against everything off"
            lines.append([work, wait, f"{_ratio(found)}{goal}", "", ""])
    head = ["work", "mode", "against plain", "against common", "against vLLM's coordinator"]
    return _markdown(head, lines)


def _mode(contender: str) -> str:
    return "direct" if contender.endswith("direct") else "safe"


def _ratio(found: Ratio) -> str:
    return f"**{found.value:.2f}** ({found.low:.2f}–{found.high:.2f})"


def figures(results: Results) -> str:
    """Every table but the parts of a time."""
    rows = tuple(row for row in results.rows if not WORKLOADS[row.workload].in_parts)
    return "\n\n".join(map(_table, tables(replace(results, rows=rows))))


def breakdown(results: Results) -> str:
    """The tables of parts of a time."""
    rows = tuple(row for row in results.rows if WORKLOADS[row.workload].in_parts)
    return "\n\n".join(map(_table, tables(replace(results, rows=rows))))


def machine(results: Results) -> str:
    """What it ran on, when, and who was left out."""
    ran: Machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in ran.versions.items())
    lines = [
        f"- {ran.processor}, {ran.cores} cores, {ran.memory / 2**30:.0f} GiB, {ran.system}",
        f"- {versions}",
        f"- {results.date}, {results.rounds} rounds, scale `{results.scale}`, load average before "
        f"{results.load:.2f}",
        *(f"- left out: {absent.contender}, because {absent.reason}" for absent in results.absent),
    ]
    return "\n".join(lines)


def _table(table: Table) -> str:
    lines = [[name, *map(_cell, cells)] for name, cells in table.lines]
    return f"**{table.title}**\n\n{_markdown(['', *table.columns], lines)}"


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    relative = f", **{cell.ratio}**" if cell.ratio else ""
    return f"{cell.value} ({cell.spread}){relative}"


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "aims": aims,
    "figures": figures,
    "machine": machine,
    "breakdown": breakdown,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
