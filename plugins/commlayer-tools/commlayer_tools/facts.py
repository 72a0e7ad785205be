"""How facts are printed: one line of cells each, and under it what is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from commlayer_tools.output import plain

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.table import Table


def fact_line(cells: Sequence[str], widths: Sequence[int], style: str, last: str = "") -> Table:
    """`cells` in columns of `widths`, the last as wide as the page leaves it, in a style of its own
    if given."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    for width in widths[: len(cells) - 1]:
        grid.add_column(width=width, overflow="fold")
    grid.add_column(overflow="fold")
    *first, end = cells
    grid.add_row(*(Text(cell, style=style) for cell in first), Text(end, style=last or style))
    return grid


def remark(text: str) -> Padding:
    """What is said of the fact above, across the page."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text), (0, 0, 0, 4))


def fact_value(fact: str, value: object) -> str:
    """The value of the fact named `fact` in words."""
    if isinstance(value, Enum):
        return str(value.value)
    if fact == "max_outstanding_per_pair" and value == 0:
        return "no limit"
    return plain(value)
