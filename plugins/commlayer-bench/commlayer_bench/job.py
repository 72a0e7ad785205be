"""What the starting process and its ranks say to each other."""

from __future__ import annotations

import msgspec

from commlayer_bench.records import Absent, Row


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The work of all ranks of one run."""

    ranks: int
    port: int
    workloads: tuple[str, ...]
    contenders: tuple[str, ...]
    rounds: int
    scale: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A case is about to be measured."""

    workload: str
    case: str


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """A case was measured."""

    rows: tuple[Row, ...]


class Away(msgspec.Struct, frozen=True, tag="away"):
    """A contender does not take part."""

    absent: Absent


Message = Progress | Rows | Away
