"""Directives that draw text as SVG inside the page: no script, no network, both colour schemes.

``layers``
    One line a layer, top first: ``name -> used 3, other 1``, several names apart by ``|``.
``sequence``
    The first line names the participants, apart by ``|``; then ``a -> b: text`` (a message),
    ``a: text`` (something that happens there), ``---: text`` (a divider), in time order.
``spans``
    The first line names moments, apart by ``|``; then ``label: from .. to: text``, each a bar.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_FONT = "font-family='var(--font-stack, sans-serif)'"
_INK = "var(--color-foreground-primary, #000)"
_SOFT = "var(--color-foreground-secondary, #555)"
_LINE = "var(--color-foreground-border, #888)"
_FILL = "var(--color-background-secondary, #f4f4f4)"
_ACCENT = "var(--color-brand-primary, #0a4bff)"


def setup(app: Sphinx) -> dict[str, Any]:
    for directive in (Layers, Sequences, Spans):
        app.add_directive(directive.name_in_pages, directive)
    return {"parallel_read_safe": True}


class Diagram(SphinxDirective):
    """A figure that is drawn from the lines of its content."""

    has_content = True
    option_spec: ClassVar[dict[str, Any]] = {"caption": directives.unchanged}
    name_in_pages: ClassVar[str]

    def run(self) -> list[nodes.Node]:
        caption = self.options.get("caption", "")
        try:
            width, height, body = self.draw([line for line in self.content if line.strip()])
        except (KeyError, ValueError) as error:
            raise self.error(f"{self.name_in_pages}: {error!r}") from error
        svg = (
            f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{escape(caption)}' "
            f"viewBox='0 0 {width} {height}' width='{width}' "
            f"style='min-width:{min(width, 480)}px'>{body}</svg>"
        )
        told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        html = f"<figure class='diagram'>{svg}{told}</figure>"
        return [nodes.raw("", html, format="html")]

    def draw(self, lines: Sequence[str]) -> tuple[int, int, str]:
        """Width, height and body of the drawing."""
        raise NotImplementedError


def _text(
    x: float, y: float, text: str, *, size: int = 13, colour: str = _INK, anchor: str = "middle",
    weight: str = "normal",
) -> str:  # fmt: skip
    return (
        f"<text x='{x}' y='{y}' font-size='{size}' fill='{colour}' text-anchor='{anchor}' "
        f"font-weight='{weight}' {_FONT}>{escape(text)}</text>"
    )


def _box(x: float, y: float, width: float, height: float, colour: str = _LINE) -> str:
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='5' fill='{_FILL}' "
        f"stroke='{colour}'/>"
    )


def _arrow(x1: float, x2: float, y: float, colour: str = _ACCENT) -> str:
    back = 7 if x2 < x1 else -7
    head = f"{x2},{y} {x2 + back},{y - 4} {x2 + back},{y + 4}"
    return (
        f"<line x1='{x1}' y1='{y}' x2='{x2}' y2='{y}' stroke='{colour}' stroke-width='1.5'/>"
        f"<polygon points='{head}' fill='{colour}'/>"
    )


class Layers(Diagram):
    name_in_pages = "layers"

    def draw(self, lines: Sequence[str]) -> tuple[int, int, str]:
        width, row, gap = 700, 44, 8
        parts = []
        for number, line in enumerate(lines):
            boxes = [entry.partition("->") for entry in line.split("|")]
            y = number * (row + gap) + 1
            each = (width - 2 - gap * (len(boxes) - 1)) / len(boxes)
            for column, (name, _, uses) in enumerate(boxes):
                x = 1 + column * (each + gap)
                parts.append(_box(x, y, each, row))
                told = uses.strip()
                parts.append(
                    _text(x + 10, y + (18 if told else 27), name.strip(), anchor="start",
                          weight="600")
                )  # fmt: skip
                if told:
                    parts.append(
                        _text(x + 10, y + 35, f"→ {told}", size=11, colour=_SOFT, anchor="start")
                    )
        return width, len(lines) * (row + gap), "".join(parts)


class Sequences(Diagram):
    name_in_pages = "sequence"

    def draw(self, lines: Sequence[str]) -> tuple[int, int, str]:
        who = [name.strip() for name in lines[0].split("|")]
        each, row, top = 168, 34, 40
        width = each * len(who)
        centre = {name: each * index + each / 2 for index, name in enumerate(who)}
        height = top + row * (len(lines) - 1) + 12
        parts = [
            f"<line x1='{x}' y1='30' x2='{x}' y2='{height}' stroke='{_LINE}' "
            "stroke-dasharray='3 4'/>"
            for x in centre.values()
        ]
        for name, x in centre.items():
            parts += [_box(x - 72, 1, 144, 28), _text(x, 20, name, weight="600")]
        for number, line in enumerate(lines[1:]):
            parts.extend(self._line(line, centre, top + row * number + 20, width))
        return width, height, "".join(parts)

    @staticmethod
    def _line(line: str, centre: dict[str, float], y: float, width: int) -> Iterator[str]:
        where, _, text = (part.strip() for part in line.partition(":"))
        if where == "---":
            yield (
                f"<line x1='4' y1='{y}' x2='{width - 4}' y2='{y}' stroke='{_LINE}'/>"
                + _text(8, y - 5, text, size=11, colour=_SOFT, anchor="start")
            )
        elif "->" in where:
            source, target = (centre[end.strip()] for end in where.split("->"))
            inset = 3 if source < target else -3
            yield _arrow(source + inset, target - inset, y)
            yield _text((source + target) / 2, y - 6, text, size=12)
        else:
            x = centre[where]
            half = min(len(text) * 3.3 + 10, width / 2)
            left = min(max(x - half, 2), width - 2 - 2 * half)
            yield _box(left, y - 15, 2 * half, 22) + _text(left + half, y, text, size=12)


class Spans(Diagram):
    name_in_pages = "spans"

    def draw(self, lines: Sequence[str]) -> tuple[int, int, str]:
        moments = [name.strip() for name in lines[0].split("|")]
        left, row, top, width = 120, 42, 34, 720
        step = (width - left - 60) / (len(moments) - 1)
        at = {name: left + 30 + index * step for index, name in enumerate(moments)}
        height = top + row * (len(lines) - 1) + 4
        parts = []
        for name, x in at.items():
            parts.append(_text(x, 14, name, size=12, colour=_SOFT))
            parts.append(
                f"<line x1='{x}' y1='22' x2='{x}' y2='{height}' stroke='{_LINE}' "
                "stroke-dasharray='3 4'/>"
            )
        for number, line in enumerate(lines[1:]):
            label, span, text = (part.strip() for part in line.split(":", 2))
            start, end = (at[name.strip()] for name in span.split(".."))
            y = top + row * number
            parts.append(_text(left - 6, y + 20, label, anchor="end", weight="600"))
            parts.append(_box(start, y, end - start, 30, _ACCENT))
            parts.append(_text((start + end) / 2, y + 20, text, size=12))
        return width, height, "".join(parts)
