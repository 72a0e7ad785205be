"""Two rows of one comparison: the ratio of their medians, and its spread over the rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from commlayer_bench.records import Results, Row, quartiles


@dataclass(frozen=True)
class Ratio:
    """`value` is of medians; `low` and `high` are the quartiles of the ratios of each round."""

    value: float
    low: float
    high: float


def ratio(row: Row, base: Row) -> Ratio:
    """`row` relative to `base`."""
    rounds = [mine / theirs for mine, theirs in zip(row.samples, base.samples, strict=True)]
    return Ratio(row.median / base.median, *quartiles(rounds))


class Lookup:
    """The rows of results by what they are of."""

    def __init__(self, results: Results) -> None:
        self._rows = {
            (row.workload, row.case, row.metric, row.contender): row for row in results.rows
        }

    def get(self, workload: str, case: str, metric: str, contender: str) -> Row | None:
        """The row, if it was measured."""
        return self._rows.get((workload, case, metric, contender))

    def ratio(
        self, workload: str, case: str, metric: str, contender: str, base: str
    ) -> Ratio | None:
        """`contender` relative to `base`, if both were measured."""
        row = self.get(workload, case, metric, contender)
        other = self.get(workload, case, metric, base)
        return None if row is None or other is None else ratio(row, other)


def grouped(rows: Iterable[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Workload, metric and their rows, in the order in which they were measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.metric), []).append(row)
    for (workload, metric), members in groups.items():
        yield workload, metric, members
