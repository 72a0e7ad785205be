"""Sphinx configuration: `make docs` builds the site into build/docs."""

from __future__ import annotations

import importlib.metadata
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "commlayer"
author = "the commlayer authors"
copyright = "the commlayer authors, Apache-2.0"
release = importlib.metadata.version("commlayer")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "diagrams",
    "generated",
    "outside_links",
]
exclude_patterns = ["_ext", "performance", "certificates/*.json"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

highlight_language = "none"
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"commlayer {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"footer_icons": [], "top_of_page_buttons": []}

copybutton_prompt_text = "$ "

_NOT_CONSTRUCTED = {
    "commlayer.CommConfig",  # its keys have a page of their own
    "commlayer.Communicator",
    "commlayer.Semantics",  # its facts have a page of their own
    "commlayer_testkit.conformance.Lab",
    "commlayer_testkit.conformance.Subject",
    "commlayer.observe.report.Finding",
    "commlayer.observe.report.Report",
    "commlayer_testkit.sim.Failure",
    "commlayer_testkit.sim.Rank",
    "commlayer_testkit.sim.Report",
    "commlayer_testkit.sim.Run",
    "commlayer_testkit.sim.World",
    "commlayer.progress.ledger.Ledger",
    "commlayer.progress.snapshot.OperationView",
    "commlayer.progress.snapshot.Snapshot",
}
"""Classes whose constructor is not part of the interface."""


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", _without_constructor)


def _without_constructor(
    app: Sphinx, what: str, name: str, value: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    made_elsewhere = name in _NOT_CONSTRUCTED or getattr(value, "_is_protocol", False)
    if what == "class" and (made_elsewhere or issubclass(value, Enum)):
        return "", ""
    return None
