"""Results as tables: one a metric of a workload, a line a case, a column a contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from commlayer_bench.compare import grouped, ratio
from commlayer_bench.contenders import CONTENDERS
from commlayer_bench.records import Results, Row
from commlayer_bench.workload import Workload
from commlayer_bench.workloads import WORKLOADS


@dataclass(frozen=True)
class Cell:
    """A median, its spread (quartiles, in the same unit), and its ratio to the base.

    `ratio` is empty where there is no base; `better` says whether it is on the good side of 1.
    """

    value: str
    spread: str
    ratio: str = ""
    better: bool = False


@dataclass(frozen=True)
class Table:
    """`lines` are a name and its cells, in the order of `columns`."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def tables(results: Results) -> Iterator[Table]:
    """The tables of `results`, in the order in which they were measured."""
    parts = [name for name in WORKLOADS if WORKLOADS[name].in_parts]
    for workload, metric, rows in grouped(row for row in results.rows if row.workload not in parts):
        of = "" if len(WORKLOADS[workload].metrics) == 1 else f": {metric}"
        yield _table(WORKLOADS[workload], of, rows, lambda row: row.case)
    for name in parts:
        for case in dict.fromkeys(row.case for row in results.rows if row.workload == name):
            rows = [row for row in results.rows if (row.workload, row.case) == (name, case)]
            yield _table(WORKLOADS[name], f", {case}", rows, lambda row: row.metric)


def _table(workload: Workload, of: str, rows: list[Row], line: Callable[[Row], str]) -> Table:
    cells = {(line(row), row.contender): row for row in rows}
    names = dict.fromkeys(row.contender for row in rows)
    known = [name for name in CONTENDERS if name in names]
    columns = (*known, *(name for name in names if name not in known))
    return Table(
        title=workload.title + of,
        columns=columns,
        lines=tuple(
            (
                name,
                tuple(
                    _cell(cells.get((name, c)), cells.get((name, workload.base))) for c in columns
                ),
            )
            for name in dict.fromkeys(map(line, rows))
        ),
    )


def _cell(row: Row | None, base: Row | None) -> Cell | None:
    if row is None:
        return None
    factor, unit = scale(row.median, row.unit)
    low, high = row.quartiles
    value = f"{number(row.median / factor)} {unit}".rstrip()
    spread = f"{number(low / factor)}–{number(high / factor)}"
    if base is None or base is row or not base.median:
        return Cell(value, spread)
    relative = ratio(row, base).value
    return Cell(value, spread, f"{relative:.2f}", (relative > 1) is (row.unit == "B/s"))


_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B/s": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")),
    "": ((1.0, ""),),
}


def scale(value: float, unit: str) -> tuple[float, str]:
    """The unit in which `value` reads best, and its size."""
    scales = _SCALES[unit]
    return next((known for known in scales if value >= known[0]), scales[-1])


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
