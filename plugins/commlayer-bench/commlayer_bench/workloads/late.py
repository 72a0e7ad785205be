"""A receive that is posted, then 20 ms of compute, then waited."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

from commlayer_bench.compute import on_the_host
from commlayer_bench.contender import Contender
from commlayer_bench.payloads import KIB, MIB, size_text, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload

COMPUTE_SECONDS = 0.020


class LateWait(Workload):
    """Rank 0 receives: what it loses of its time before and after computing.

    ``post`` is the call that posts the receive, for which a contender that has
    to wait for metadata blocks; ``wait`` is the time in wait and result; ``lost``
    is both.
    """

    name = "late"
    title = "A receive posted, 20 ms of compute, then waited"
    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {"post": "s", "wait": "s", "lost": "s"}
    count = 5

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        sizes = (KIB,) if scale is Scale.tiny else (KIB, 64 * KIB, MIB)
        return [Case(f"2 × {size_text(size)}", 2 * size) for size in sizes]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("dict")
        if way is None:
            return None
        message = two_tensors(int(case.x) // 2)
        compute = on_the_host(COMPUTE_SECONDS)

        def receive() -> tuple[float, float, float]:
            here.signal(1)
            begin = here.now()
            finish = way.receive(message, 1)
            posted = here.now()
            compute()
            ready = here.now()
            finish()
            end = here.now()
            here.signal(1)
            return posted - begin, end - ready, posted - begin + end - ready

        def measure() -> Mapping[str, float]:
            parts = zip(*(receive() for _ in range(self.count)), strict=True)
            return dict(zip(self.metrics, map(statistics.median, parts), strict=True))

        def produce() -> Mapping[str, float]:
            for _ in range(self.count):
                here.await_signal(0)
                finish = way.send(message, 0)
                if contender.driven:
                    finish()
                here.await_signal(0)
                if not contender.driven:
                    finish()
            return {}

        return measure if here.rank == 0 else produce
