"""Throw-away distributions: a module and a ``dist-info`` folder on ``sys.path``."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

PLUGIN = """
from commlayer.backend import Backend, Viability
from commlayer.hooks import hookimpl
from commlayer.semantics import Semantics

class Example(Backend):
    name = {name!r}
    plugin_api = {plugin_api!r}
    semantics = Semantics()
    priority = {priority}

    def viability(self):
        {viability}

    def open(self, world, options):
        raise NotImplementedError

@hookimpl
def commlayer_backend():
    return Example()
"""


class Site:
    """A folder of installed distributions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def plugin(
        name: str,
        *,
        plugin_api: object = (1, 1),
        priority: object = 0,
        viability: str = "return Viability(True, 'always')",
    ) -> str:
        """Source of a healthy plugin module, or of one with a single thing changed."""
        return PLUGIN.format(
            name=name, plugin_api=plugin_api, priority=priority, viability=viability
        )

    def install(self, distribution: str, source: str, name: str, *, version: str = "1.0") -> str:
        """Install a plugin that provides `name`; returns its module's name."""
        module = distribution.replace("-", "_")
        (self.path / f"{module}.py").write_text(source)
        self.metadata(distribution, f"[commlayer.backends]\n{name} = {module}\n", version=version)
        return module

    def metadata(self, distribution: str, entry_points: str, *, version: str = "1.0") -> None:
        folder = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (folder / "entry_points.txt").write_text(entry_points)

    def entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return [
            point
            for distribution in importlib.metadata.distributions(path=[str(self.path)])
            for point in distribution.entry_points
        ]


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield Site(tmp_path)
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
