"""What posting a send takes of the caller's time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

from commlayer_bench.contender import Contender
from commlayer_bench.exchange import answer, send
from commlayer_bench.payloads import KIB, MIB, size_text, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload


class Post(Workload):
    """The call alone; the message before was received and waited."""

    name = "post"
    title = "The caller's post of a dict of two tensors, fire-and-forget"
    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {"post": "s"}
    count = 40

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        sizes = (KIB,) if scale is Scale.tiny else (KIB, 64 * KIB, MIB)
        return [Case(f"2 × {size_text(size)}", 2 * size) for size in sizes]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("dict")
        if way is None:
            return None
        message = two_tensors(int(case.x) // 2)

        def measure() -> Mapping[str, float]:
            times = [send(way, message, here, driven=contender.driven) for _ in range(self.count)]
            return {"post": statistics.median(posted for posted, _ in times)}

        def consume() -> Mapping[str, float]:
            for _ in range(self.count):
                answer(way, message, here)
            return {}

        return measure if here.rank == 0 else consume
