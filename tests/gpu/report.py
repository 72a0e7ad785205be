"""What a run on devices reports: a table for people on standard error, one JSON for programs."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field

OK, FAILED, SKIPPED, NOT_RUN = "ok", "FAILED", "skipped", "not run"


@dataclass(frozen=True)
class Row:
    """How one case or test ended; `verdict` is one of the four above."""

    name: str
    verdict: str
    seconds: float
    expected: str = ""
    seen: str = ""
    figures: dict[str, object] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.verdict in (OK, SKIPPED)


def show(row: Row) -> None:
    """Print a row for people."""
    figures = ", ".join(f"{name} {value}" for name, value in row.figures.items())
    _line(row.verdict, row.name, f"{row.seconds:.1f} s")
    for name, text in (("expected", row.expected), ("seen", row.seen), ("figures", figures)):
        if text:
            _line("", name, text)


def say(text: str) -> None:
    """Print text for people."""
    print(text, file=sys.stderr, flush=True)


def _line(verdict: str, name: str, text: str) -> None:
    width = 44 if verdict else 10
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 88)] or [""]
    say(f"{verdict:<9}{name:<{width - 2}}  {lines[0]}")
    for line in lines[1:]:
        say(f"{'':<{9 + width}}{line}")
