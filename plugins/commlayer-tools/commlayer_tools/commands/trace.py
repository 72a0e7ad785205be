"""``commlayer trace DIR``: join what the flight recorders of all ranks have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from commlayer_tools.output import JSON, print_json


def register(app: typer.Typer) -> None:
    app.command()(trace)


def trace(
    folder: Path = typer.Argument(help="Folder with the dumps of all ranks.", metavar="DIR"),
    out: Path = typer.Option(None, "--out", help="Folder for the results; DIR if not given."),
    json: bool = JSON,
) -> None:
    """Write a trace for Chrome or Perfetto, and a timeline page, per connection."""
    from commlayer_tools.trace import join, load

    connections = load(folder)
    results = [_write(join(name, dumps), out or folder) for name, dumps in connections.items()]
    if json:
        print_json(results)
        return
    for result in results:
        typer.echo(
            f"{result['connection']}: {len(result['ranks'])} of {result['world_size']} ranks, "
            f"{result['operations']} operations, {result['messages']} messages seen on both sides, "
            f"{result['seconds']:.3g} s"
        )
        typer.echo(f"  timeline: {result['timeline']}")
        typer.echo(f"  trace for chrome://tracing or ui.perfetto.dev: {result['trace']}")


def _write(trace: Any, out: Path) -> dict[str, Any]:
    import msgspec

    from commlayer.errors import CommError, ErrorKind
    from commlayer_tools.timeline import page
    from commlayer_tools.trace import chrome

    trace_path = out / f"{trace.name}.chrome.json"
    page_path = out / f"{trace.name}.html"
    try:
        out.mkdir(parents=True, exist_ok=True)
        trace_path.write_bytes(msgspec.json.encode(chrome(trace)))
        page_path.write_text(page(trace), encoding="utf-8")
    except OSError as error:
        raise CommError(
            ErrorKind.CONFIG, f"write to {out}", str(error), "Name a folder that can be written"
        ) from error
    return {
        "connection": trace.name,
        "ranks": [dump.who.rank for dump in trace.dumps],
        "world_size": trace.dumps[0].who.world_size,
        "operations": len(trace.entries),
        "pending": sum(entry.open for entry in trace.entries),
        "messages": len(trace.messages),
        "seconds": trace.duration,
        "clocks": list(trace.clocks),
        "timeline": str(page_path),
        "trace": str(trace_path),
    }
