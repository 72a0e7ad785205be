"""Figures for a monitoring system, kept by another distribution.

What counts plugs in, so that a rank that nobody scrapes loads none of it.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection
from typing import Protocol

from commlayer.errors import CommError, ErrorKind
from commlayer.lanes.connection import Connection
from commlayer.observe.spans import Sink

GROUP = "commlayer.metrics"
"""Entry-point group of exporters."""


class Exporter(Sink, Protocol):
    """Counts one connection.  `stalls` counts its stall reports; whoever makes them adds to it.

    `in_files` is True if figures are seen only once `publish` has written them.
    """

    stalls: int

    @property
    def in_files(self) -> bool: ...

    def publish(self) -> None: ...

    def close(self) -> None: ...


class MakeExporter(Protocol):
    """What an entry point of the group names.  Receives on `may_idle` channels have no age."""

    def __call__(
        self, connection: Connection, backend: str, name: str, may_idle: Collection[str]
    ) -> Exporter: ...


def load_exporter() -> MakeExporter:
    """Return what makes exporters.  Raises `CommError` (UNSUPPORTED) where none is installed."""
    for point in importlib.metadata.entry_points(group=GROUP):
        make: MakeExporter = point.load()
        return make
    raise CommError(
        ErrorKind.UNSUPPORTED,
        "metrics",
        "commlayer-metrics is not installed",
        "pip install 'commlayer[metrics]', or leave `metrics` off",
    )
