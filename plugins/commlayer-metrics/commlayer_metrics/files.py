"""Figures in the files of prometheus-client's multiprocess mode.

There, one process serves what all have written, and asks no collector of the
others.  The mode is on where ``PROMETHEUS_MULTIPROC_DIR`` was set when
prometheus-client was imported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from commlayer.forks import let_go_in_child

_Series = tuple[str, tuple[str, ...]]


class Files:
    """The files of this process, which outlive it."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._values: dict[_Series, Any] = {}
        self._gauges: set[_Series] = set()
        self._lock = let_go_in_child(threading.Lock())

    @classmethod
    def open(cls) -> Files | None:
        """Those of prometheus-client, or ``None`` outside the multiprocess mode."""
        from prometheus_client import values

        return None if values.ValueClass is values.MutexValue else cls(values.ValueClass)

    def write(self, families: Iterable[Any]) -> None:
        """Write all samples; gauges that are in none of `families` any more become 0."""
        with self._lock:
            gone = set(self._gauges)
            for family in families:
                for name, labels, value in _samples(family):
                    series = name, tuple(labels.values())
                    if series not in self._values:
                        self._values[series] = self._new(family, name, labels)
                    self._values[series].set(value)
                    if family.type == "gauge":
                        self._gauges.add(series)
                        gone.discard(series)
            for series in gone:
                self._values[series].set(0.0)

    def _new(self, family: Any, name: str, labels: dict[str, str]) -> Any:
        return self._value(
            family.type,
            family.name,
            name,
            tuple(labels),
            tuple(labels.values()),
            family.documentation,
            multiprocess_mode="livesum" if family.type == "gauge" else "",
        )


def _samples(family: Any) -> Iterator[tuple[str, dict[str, str], float]]:
    """Samples as they are in files: each bucket counts its own, and their sum is not there."""
    below = 0.0
    for sample in family.samples:
        name, labels, value = sample.name, sample.labels, sample.value
        if family.type == "histogram" and name.endswith("_count"):
            continue
        if "le" in labels:
            value, below = value - below, 0.0 if labels["le"] == "+Inf" else value
        yield name, labels, value
