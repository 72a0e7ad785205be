"""How commands print: one JSON document, or a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

JSON = typer.Option(False, "--json", help="Print one JSON document.")


def print_json(value: Any) -> None:
    """Print `value` (anything msgspec encodes) as indented JSON."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = ""
) -> None:
    """Print cells as `plain` text; all columns but the first wrap."""
    from rich.console import Console

    Console().print(_table(columns, rows, title))


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == columns[0])
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table


def plain(value: object) -> str:
    """A fact or setting in words."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    return str(value)
