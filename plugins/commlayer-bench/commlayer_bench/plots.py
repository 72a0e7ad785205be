"""Results as pictures.  Needs matplotlib, of the extra ``bench``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from commlayer_bench.compare import Ratio, ratio
from commlayer_bench.contenders import FLOOR
from commlayer_bench.payloads import size_text
from commlayer_bench.records import Results, Row
from commlayer_bench.tables import number, scale
from commlayer_bench.workloads import WORKLOADS

COLOURS = {
    "plain": "#4d4d4d",
    "common": "#d98c2b",
    "object_list": "#b8a13c",
    "mpi pickle": "#9c79c4",
    "mpi buffer": "#6a4c9c",
    "vllm": "#c2504a",
    "commlayer": "#2b8fb3",
    "commlayer direct": "#0b5d7a",
}
MARKERS = {"plain": "s", "commlayer": "o", "commlayer direct": "D"}
STYLE = {
    "figure.constrained_layout.use": True,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "commlayer",
    "savefig.dpi": 150,
}


def draw(results: Results, folder: Path, form: str = "svg") -> Iterator[Path]:
    """Draw every picture that `results` have rows for, and yield its file."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, picture in PICTURES.items():
            figure = picture(results.rows)
            if figure is None:
                continue
            file = folder / f"{name}.{form}"
            metadata = {"Date": None} if form == "svg" else None
            figure.savefig(file, format=form, metadata=metadata)
            pyplot.close(figure)
            yield file


def _by_size(metric: str) -> Callable[[Sequence[Row]], Figure | None]:
    panels = [(name, metric) for name in ("dict", "tensor", "object", "broadcast")]
    return lambda rows: _lines(rows, panels, f"{metric} by bytes in a message")


def _growth(rows: Sequence[Row]) -> Figure | None:
    panels = [
        ("in_flight", "operation"),
        ("tensors", "per tensor"),
        ("schemas", "latency"),
        ("peers", "per peer"),
    ]
    return _lines(rows, panels, "What an operation costs as something grows")


def _lines(rows: Sequence[Row], panels: Sequence[tuple[str, str]], title: str) -> Figure | None:
    """A log-log panel for each workload and metric; bands are quartiles."""
    panels = [panel for panel in panels if _of(rows, *panel)]
    if not panels:
        return None
    wide = min(2, len(panels))
    high = -(-len(panels) // wide)
    figure: Figure
    figure, axes = pyplot.subplots(
        high, wide, figsize=(4.6 * wide, 3.1 * high + 0.6), squeeze=False
    )
    for axis, (workload, metric) in zip(axes.flat, panels, strict=False):
        _panel(axis, _of(rows, workload, metric), workload, metric)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(title[0].upper() + title[1:], x=0.01, ha="left", fontweight="bold", fontsize=12)
    _legend(figure, axes.flat)
    return figure


def _panel(axis: Axes, rows: Sequence[Row], workload: str, metric: str) -> None:
    for contender in COLOURS:
        mine = sorted((row for row in rows if row.contender == contender), key=lambda row: row.x)
        if not mine:
            continue
        xs = [row.x for row in mine]
        style: dict[str, Any] = {"color": COLOURS[contender], "label": contender}
        axis.plot(
            xs, [row.median for row in mine], marker=MARKERS.get(contender, "."), markersize=4.5,
            linewidth=2.2 if contender.startswith("commlayer") else 1.4, **style,
        )  # fmt: skip
        low, high = zip(*(row.quartiles for row in mine), strict=True)
        axis.fill_between(xs, low, high, color=style["color"], alpha=0.13, linewidth=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_title(f"{workload.replace('_', ' ')}, {metric}")
    axis.set_xlabel(WORKLOADS[workload].axis)
    if "bytes" in WORKLOADS[workload].axis:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: size_text(x)))
    else:
        axis.set_xticks(sorted({row.x for row in rows}))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    _scaled(axis, rows[0].unit)


def _scaled(axis: Axes, unit: str) -> None:
    """Label the vertical axis in the unit that reads best at each tick."""

    def text(value: float, _: object) -> str:
        factor, name = scale(value, unit)
        return f"{number(value / factor)} {name}"

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axis.yaxis.set_major_formatter(FuncFormatter(text))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _ratios(rows: Sequence[Row]) -> Figure | None:
    """Times relative to the floor, as bars; whiskers are quartiles of each round's ratio."""
    groups: list[tuple[str, list[tuple[Row, Ratio]]]] = []
    for workload, metric in (("dict", "latency"), ("post", "post"), ("late", "lost")):
        mine = _of(rows, workload, metric)
        floors = {row.case: row for row in mine if row.contender == FLOOR}
        for case, floor in floors.items():
            others = [row for row in mine if row.case == case and row is not floor]
            groups.append((f"{workload}, {case}", [(row, ratio(row, floor)) for row in others]))
    groups = [group for group in groups if group[1]]
    if not groups:
        return None
    names = [
        name for name in COLOURS if any(row.contender == name for _, b in groups for row, _ in b)
    ]
    thick = 0.8 / len(names)
    figure: Figure
    figure, axis = pyplot.subplots(figsize=(8.6, 0.4 + len(groups) * (0.25 + 0.17 * len(names))))
    for place, (_, bars) in enumerate(groups):
        for row, value in bars:
            at = place + (names.index(row.contender) - (len(names) - 1) / 2) * thick
            colour, label = COLOURS[row.contender], row.contender if place == 0 else None
            axis.barh(at, value.value - 1, left=1, height=thick * 0.92, color=colour, label=label)
            axis.hlines(at, value.low, value.high, color="#222222", linewidth=0.9)
    axis.axvline(1, color=COLOURS[FLOOR], linewidth=1.2)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_yticks(range(len(groups)), [name for name, _ in groups])
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("time relative to plain isend and irecv of known shapes (left is faster)")
    figure.suptitle("Relative to the floor", x=0.01, ha="left", fontweight="bold", fontsize=12)
    _legend(figure, [axis])
    return figure


PARTS = {"encode": "#0b5d7a", "header": "#2b8fb3", "payload": "#8cc5d6", "hand over": "#d98c2b"}


def _breakdown(rows: Sequence[Row]) -> Figure | None:
    """The parts of one dict's time, stacked."""
    mine = [row for row in rows if row.workload == "breakdown"]
    cases = list(dict.fromkeys(row.case for row in mine))
    if not cases:
        return None
    names = [name for name in COLOURS if any(row.contender == name for row in mine)]
    figure: Figure
    figure, axes = pyplot.subplots(
        len(cases), 1, figsize=(8.6, (0.8 + 0.34 * len(names)) * len(cases) + 0.6), squeeze=False
    )
    for axis, case in zip(axes.flat, cases, strict=True):
        for place, name in enumerate(names):
            parts = {r.metric: r for r in mine if (r.case, r.contender) == (case, name)}
            left = 0.0
            for part, colour in PARTS.items():
                if part in parts:
                    value = parts[part].median * 1e6
                    axis.barh(place, value, left=left, color=colour, height=0.62,
                              label=part if place == len(names) - 1 else None)  # fmt: skip
                    left += value
            if left == 0.0 and "all" in parts:
                axis.barh(place, parts["all"].median * 1e6, color="#b5b5b5", height=0.62)
            if "post returns" in parts:
                at = parts["post returns"].median * 1e6
                label = "post returns" if place == 0 else None
                axis.plot(at, place, "|", color="#222222", ms=15, mew=1.6, label=label)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.set_title(case)
        axis.set_xlabel("µs")
    figure.suptitle(
        "Where the time of a dict goes", x=0.01, ha="left", fontweight="bold", fontsize=12
    )
    _legend(figure, axes.flat)
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = (
        sorted(entries, key=list(COLOURS).index) if entries.keys() <= COLOURS.keys() else entries
    )
    per_line = min(len(entries), int(figure.get_figwidth() // 1.45))
    figure.legend(
        [entries[name] for name in order], order, loc="outside lower center", ncols=per_line
    )


def _of(rows: Sequence[Row], workload: str, metric: str) -> list[Row]:
    return [row for row in rows if (row.workload, row.metric) == (workload, metric)]


PICTURES: dict[str, Callable[[Sequence[Row]], Figure | None]] = {
    "latency": _by_size("latency"),
    "throughput": _by_size("throughput"),
    "ratios": _ratios,
    "growth": _growth,
    "breakdown": _breakdown,
}
