"""``commlayer probe NAME``: measure a backend's facts and compare them with what it declares."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer
from commlayer_tools.facts import fact_line, fact_value, remark
from commlayer_tools.output import JSON, print_json

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from commlayer_testkit.conformance.probes import ProbeReport


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
    Exits with 1 when a fact is over-claimed, and when nothing could be measured.
    """
    from commlayer_testkit.conformance.probes import run

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
    if all(fact.verdict.value == "not_measured" for fact in report.facts):
        typer.echo("nothing was measured: see the reasons", err=True)
        raise typer.Exit(1)
    if not report.certifiable:
        raise typer.Exit(1)


def _encoded(report: ProbeReport) -> dict[str, object]:
    import msgspec

    return {**msgspec.to_builtins(report), "certifiable": report.certifiable}


_WIDTHS = (24, 17, 17)
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
    """One line per fact, and under it how it was measured."""
    from rich.console import Group

    columns = ["measured"] if report.c10d else ["declared", "measured", "verdict"]
    lines: list[RenderableType] = []
    group = None
    for fact in report.facts:
        kind, _, name = fact.fact.rpartition(".")
        if kind != group:
            lines += ["", fact_line([kind or "transport", *columns], _WIDTHS, "underline")]
            group = kind
        cells, style = [name, _value(name, fact.measured)], ""
        if not report.c10d:
            cells = [name, _value(name, fact.declared), cells[1], _words(fact.verdict.value)]
            style = _STYLES[fact.verdict.value]
        lines.append(fact_line(cells, _WIDTHS, "bold", style))
        lines += [remark(text) for text in (fact.reason, *fact.evidence) if text]
    return Group(*lines)


def _words(verdict: str) -> str:
    return verdict.replace("_", " " if verdict == "not_measured" else "-")


def _value(fact: str, value: object) -> str:
    return "-" if value is None else fact_value(fact, value)
