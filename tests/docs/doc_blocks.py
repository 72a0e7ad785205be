"""The Python blocks of a page, and how they are run.

- A block whose first line reads ``# NAME.py, run as: torchrun --nproc-per-node N NAME.py``
  is a script of N ranks.
- A block that follows ``<!-- fragment: WHY -->`` is no program and is only compiled.
- Any other block runs in this process, in the namespace of the page's earlier blocks.
- A text block that follows ``<!-- prints -->`` is what the block before it prints, ranks sorted.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>fragment: .+|prints) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_SCRIPT = re.compile(r"# \w+\.py, run as: torchrun --nproc-per-node (\d+) ")


class Block(NamedTuple):
    """One Python block.  `ranks` is 0 for one that runs in this process."""

    page: str
    line: int
    code: str
    fragment: bool
    ranks: int
    prints: str | None

    def compiled(self) -> Any:
        """The code, whose lines have the numbers that they have in the page."""
        source = "\n" * (self.line - 1) + self.code
        return compile(source, str(ROOT / self.page), "exec", dont_inherit=True)


def blocks_of(page: Path) -> list[Block]:
    """All Python blocks of `page`, in order."""
    text = page.read_text()
    found: list[Block] = []
    for match in _BLOCK.finditer(text):
        mark = match["mark"] or ""
        if match["language"] == "python":
            script = _SCRIPT.match(match["text"])
            found.append(
                Block(
                    str(page.relative_to(ROOT)),
                    text.count("\n", 0, match.start("text")) + 1,
                    match["text"],
                    mark.startswith("fragment"),
                    int(script[1]) if script else 0,
                    None,
                )
            )
        elif mark == "prints":
            found[-1] = found[-1]._replace(prints=match["text"])
    return found


def run(block: Block, namespace: dict[str, Any]) -> str:
    """What `block` prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block.compiled(), namespace)
    return printed.getvalue()


def run_as_rank(block: Block) -> str:
    """What `block` prints on one rank; the environment says which."""
    return run(block, {"__name__": "__main__"})


def pages() -> list[Path]:
    """Every page with prose of ours; those that are only built are not."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
