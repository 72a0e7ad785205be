"""Links from a page to what is in the repository but not in the site become plain text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)]*)?\)")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _replace)
    return {"parallel_read_safe": True}


def _replace(app: Sphinx, docname: str, source: list[str]) -> None:
    root = Path(app.srcdir)
    page = Path(app.env.doc2path(docname)).parent
    lines, fenced = source[0].split("\n"), False
    for number, line in enumerate(lines):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            lines[number] = _LINK.sub(lambda link: _kept(link, page, root), line)
    source[0] = "\n".join(lines)


def _kept(link: re.Match[str], page: Path, root: Path) -> str:
    target = (page / link[2]).resolve()
    if target.is_relative_to(root) and target.suffix == ".md":
        return link[0]
    text = link[1].strip("`")
    try:
        return f"`{target.relative_to(root.parent)}`" if "/" in text or "." in text else text
    except ValueError:
        return link[0]
