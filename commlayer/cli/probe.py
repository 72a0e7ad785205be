"""``commlayer probe NAME``: measure a backend's facts and compare them with what it declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from commlayer.cli._output import JSON, plain, print_json

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from commlayer.conformance.probes import FactReport, ProbeReport


def register(app: typer.Typer) -> None:
    app.command()(probe)


def probe(
    name: str = typer.Argument("", help="Name of an installed backend."),
    c10d: str = typer.Option(
        "", help="Probe this torch.distributed backend instead, without a plugin; MODULE:NAME too."
    ),
    facts: str = typer.Option("", help="Only these, by commas: p2p.poll,collective,progress."),
    patience: float = typer.Option(
        1.0, min=0.1, max=60.0, help="Seconds without an event that count as never."
    ),
    json: bool = JSON,
) -> None:
    """Measure the facts of a backend and compare them with what it declares.

    Starts pairs of processes, some of which abort or are killed on purpose.
    Exits with 1 when a fact is over-claimed.
    """
    from commlayer.conformance.probes import run

    if bool(name) == bool(c10d):
        raise typer.BadParameter("give NAME or --c10d NAME")
    measure = run.probe_c10d if c10d else run.probe
    selected = [fact.strip() for fact in facts.split(",") if fact.strip()]
    try:
        report = measure(
            c10d or name,
            facts=selected,
            patience=patience,
            heard=lambda fact: typer.echo(f"measuring {fact}", err=True),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        print_json({**_encoded(report), "draft": report.draft() if report.c10d else None})
    else:
        _print(report)
    if not report.certifiable:
        raise typer.Exit(1)


def _encoded(report: ProbeReport) -> dict[str, object]:
    import msgspec

    return {**msgspec.to_builtins(report), "certifiable": report.certifiable}


_STYLES = {
    "correct": "green",
    "over_claimed": "bold red",
    "under_claimed": "yellow",
    "not_measured": "dim",
    "undeclared": "",
}


def _print(report: ProbeReport) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    versions = ", ".join(f"{part} {version}" for part, version in report.versions.items())
    console.print(f"{'c10d backend' if report.c10d else 'backend'} {report.name} ({versions})")
    console.print(_table(report))
    counts = Counter(fact.verdict.value for fact in report.facts)
    summary = ", ".join(f"{counts[name]} {_words(name)}" for name in _STYLES if counts[name])
    console.print(f"\n{summary}; {report.seconds:.0f} s")
    if not report.certifiable:
        console.print("Over-claimed facts refuse certification: declare what was measured.")
    if report.c10d:
        typer.echo(f"\nDraft of its facts; check what was not measured:\n\n{report.draft()}")


def _table(report: ProbeReport) -> Group:
    """One line per fact, and under it, across the page, how it was measured."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def line(cells: Sequence[str], style: str, last: str) -> Table:
        grid = Table.grid(padding=(0, 2, 0, 0))
        for width in (24, 17, 17)[: len(cells) - 1]:
            grid.add_column(width=width, overflow="fold")
        grid.add_column(overflow="fold")
        grid.add_row(*(Text(cell, style=style) for cell in cells[:-1]), Text(cells[-1], style=last))
        return grid

    columns = ["measured"] if report.c10d else ["declared", "measured", "verdict"]
    lines: list[RenderableType] = []
    group = None
    for fact in report.facts:
        kind, _, name = fact.fact.rpartition(".")
        if kind != group:
            lines += ["", line([kind or "transport", *columns], "underline", "underline")]
            group = kind
        cells, style = [name, _value(fact, fact.measured)], "bold"
        if not report.c10d:
            cells = [name, _value(fact, fact.declared), cells[1], _words(fact.verdict.value)]
            style = _STYLES[fact.verdict.value]
        lines.append(line(cells, "bold", style))
        for text in filter(None, [fact.reason, *fact.evidence]):
            lines.append(Padding(Text(text), (0, 0, 0, 4)))
    return Group(*lines)


def _words(verdict: str) -> str:
    return verdict.replace("_", " " if verdict == "not_measured" else "-")


def _value(fact: FactReport, value: object) -> str:
    if value is None:
        return "-"
    if fact.fact.endswith("max_outstanding_per_pair") and value == 0:
        return "no limit"
    if fact.fact.endswith("dtypes") and not value:
        return "bytes only"
    return plain(value)
