"""``commlayer describe NAME``: the facts that one backend declares, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from commlayer_tools.facts import fact_line, fact_value, remark
from commlayer_tools.output import JSON, plain, print_json

if TYPE_CHECKING:
    from commlayer.loading import LoadedBackend
    from commlayer.semantics import Semantics

KINDS = ("p2p", "collective")

Fact = tuple[tuple[str, ...], list[str]]
"""The cells of one fact (name and values), and the lines that explain them."""

_WIDTHS = (26, 18)


def register(app: typer.Typer) -> None:
    app.command()(describe)


def describe(
    name: str = typer.Argument(help="Name of an installed backend."), json: bool = JSON
) -> None:
    """Show versions, viability and every declared fact of a backend."""
    from commlayer.registry import default_registry

    loaded = default_registry().load(name)
    if json:
        print_json(_report(loaded))
    else:
        _print(loaded)


def _report(loaded: LoadedBackend) -> dict[str, Any]:
    backend, viability = loaded.backend, loaded.viability()
    return {
        "name": backend.name,
        "distribution": loaded.distribution,
        "version": loaded.version,
        "plugin_api": backend.plugin_api,
        "priority": backend.priority,
        "viable": viability.ok,
        "reason": viability.reason,
        "install": viability.install,
        "versions": loaded.versions(),
        "facts": backend.semantics.facts(),
        "sources": _sources(loaded),
    }


def _print(loaded: LoadedBackend) -> None:
    report = _report(loaded)
    low, high = report["plugin_api"]
    typer.echo(f"{report['name']}: {loaded.origin}, plugin API {low} to {high}")
    typer.echo(f"viable: {plain(report['viable'])} ({report['reason']})")
    if report["install"]:
        typer.echo(f"what to do: {report['install']}")
    for component, version in report["versions"].items():
        typer.echo(f"{component}: {version}")
    semantics, sources = loaded.backend.semantics, report["sources"]
    _print_facts(("operations", *KINDS), _operation_facts(semantics, sources))
    _print_facts(("transport", "value"), _transport_facts(semantics, sources))


def _print_facts(header: Sequence[str], facts: Iterable[Fact]) -> None:
    """One line of values per fact, and under it what they mean."""
    from rich.console import Console

    console = Console()
    console.print()
    console.print(fact_line(header, _WIDTHS, "underline"))
    for cells, meaning in facts:
        console.print(fact_line(cells, _WIDTHS, "bold"))
        for text in filter(None, meaning):
            console.print(remark(text))


def _operation_facts(semantics: Semantics, sources: Mapping[str, str]) -> Iterator[Fact]:
    from commlayer.semantics import OperationSemantics, meaning

    for fact in semantics.p2p.__struct_fields__:
        values = [getattr(getattr(semantics, kind), fact) for kind in KINDS]
        said = [_said(value) for value in values]
        lines = [meaning(OperationSemantics, fact)]
        if values[0] == values[1]:
            lines.append(said[0])
        else:
            lines += [f"{kind}: {text}" for kind, text in zip(KINDS, said, strict=True) if text]
        for kind in KINDS:
            if source := sources.get(f"{kind}.{fact}"):
                lines.append(f"{kind} source: {source}")
        yield (fact, *(fact_value(fact, value) for value in values)), lines


def _transport_facts(semantics: Semantics, sources: Mapping[str, str]) -> Iterator[Fact]:
    from commlayer.semantics import Semantics, meaning

    for fact in semantics.__struct_fields__:
        if fact not in KINDS:
            value = getattr(semantics, fact)
            lines = [meaning(Semantics, fact), _said(value)]
            if source := sources.get(fact):
                lines.append(f"source: {source}")
            yield (fact, fact_value(fact, value)), lines


def _said(value: object) -> str:
    """What a value of an enumerated fact says; empty for other values."""
    return str(getattr(value, "description", ""))


def _sources(loaded: LoadedBackend) -> dict[str, str]:
    """Where facts come from: ``p2p.poll`` or ``progress`` to text, as far as the plugin says."""
    return dict(getattr(loaded.backend, "sources", {}))
