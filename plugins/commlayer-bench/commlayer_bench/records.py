"""What a benchmark leaves behind: typed records, kept as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

SCHEMA = 1
"""Version of the JSON; raised when a reader of the one before could not read it."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures come from.  `memory` is in bytes."""

    processor: str
    cores: int
    memory: int
    system: str
    versions: dict[str, str]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one contender in one case of a workload.

    `x` is the number that the cases of a workload differ in (bytes, operations,
    ranks).  `samples` has one value a round, in `unit`.
    """

    workload: str
    case: str
    x: float
    contender: str
    metric: str
    unit: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third; of a single sample, that sample twice."""
        return quartiles(self.samples)


class Absent(msgspec.Struct, frozen=True):
    """A contender that did not run, and why."""

    contender: str
    reason: str


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark.

    `load` is the load average of the minute before: well above 0, other programs
    took part.
    """

    schema: int
    date: str
    rounds: int
    scale: str
    load: float
    machine: Machine
    rows: tuple[Row, ...]
    absent: tuple[Absent, ...]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def decode(data: bytes) -> Results:
    """Read `Results.encode`.  Raises `ValueError` for what is none, or of another schema."""
    results = msgspec.json.decode(data, type=Results)
    if results.schema != SCHEMA:
        raise ValueError(f"the results have schema {results.schema}, this reads {SCHEMA}")
    return results


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third
