"""What grows in a message or from message to message: tensors in a dict, schemas in use."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from commlayer_bench.contender import Contender
from commlayer_bench.exchange import answer, send
from commlayer_bench.payloads import KIB, many_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload

GROWTH: Mapping[Scale, Sequence[int]] = {
    Scale.tiny: (1, 3),
    Scale.quick: (1, 10, 100),
    Scale.full: (1, 10, 100, 1000),
}


class _Cycle(Workload):
    """Dicts that take turns, each to its consumer, with a one-byte reply."""

    def dicts(self, count: int) -> list[dict[str, Any]]:
        raise NotImplementedError

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("dict")
        if way is None:
            return None
        dicts = self.dicts(int(case.x))
        (metric,) = self.metrics

        def measure() -> Mapping[str, float]:
            times = [send(way, message, here, driven=contender.driven) for message in dicts]
            return {metric: statistics.median(replied for _, replied in times)}

        def consume() -> Mapping[str, float]:
            for message in dicts:
                answer(way, message, here)
            return {}

        return measure if here.rank == 0 else consume


class TensorsPerDict(_Cycle):
    name = "tensors"
    title = "A dict of many tensors of 1 KiB, per tensor"
    axis = "tensors in a dict"
    metrics: ClassVar[Mapping[str, str]] = {"per tensor": "s"}

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        return [Case(str(count), count) for count in GROWTH[scale]]

    def dicts(self, count: int) -> list[dict[str, Any]]:
        message = many_tensors(count, KIB)
        return [message] * (5 if count > 100 else 20)

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        turn = super().prepare(case, contender, here)
        if turn is None:
            return None
        return lambda: {metric: value / case.x for metric, value in turn().items()}


class Schemas(_Cycle):
    """Dicts of two tensors of about 32 KiB whose shapes take turns."""

    name = "schemas"
    title = "Dicts of two tensors of 32 KiB whose shapes take turns"
    axis = "different shapes"
    metrics: ClassVar[Mapping[str, str]] = {"latency": "s"}

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        return [Case(str(count), count) for count in GROWTH[scale]]

    def dicts(self, count: int) -> list[dict[str, Any]]:
        shapes = [
            {
                key: torch.ones(16 * KIB + index, dtype=torch.bfloat16)
                for key in ("hidden_states", "residual")
            }
            for index in range(count)
        ]
        return shapes * max(1, 40 // count)
