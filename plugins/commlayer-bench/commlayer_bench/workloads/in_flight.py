"""What one operation costs when many are in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from commlayer_bench.contender import Contender
from commlayer_bench.payloads import one_tensor
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload


class InFlight(Workload):
    """Sends of 64 bytes that are all posted before any is received, per operation.

    ``post`` is the sender's call; ``operation`` is everything, from the first
    post until all are received and waited.
    """

    name = "in_flight"
    title = "Sends in flight before the first is received, per operation"
    axis = "operations in flight"
    metrics: ClassVar[Mapping[str, str]] = {"operation": "s", "post": "s"}

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        counts = {
            Scale.tiny: (10,),
            Scale.quick: (10, 100, 1000, 10_000),
            Scale.full: (10, 100, 1000, 10_000, 100_000),
        }[scale]
        return [Case(f"{n:,}", n, most_rounds=max(3, 300_000 // n)) for n in counts]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("tensor")
        if way is None:
            return None
        message = one_tensor(64)
        count = int(case.x)
        repeats = max(1, min(20, 500 // count))

        def send() -> tuple[float, float]:
            begin = here.now()
            posted = [way.send(message, 1) for _ in range(count)]
            middle = here.now()
            here.signal(1)
            for finish in posted:
                finish()
            here.await_signal(1)
            return middle - begin, here.now() - begin

        def measure() -> Mapping[str, float]:
            posts, totals = zip(*(send() for _ in range(repeats)), strict=True)
            done = count * repeats
            return {"operation": sum(totals) / done, "post": sum(posts) / done}

        def consume() -> Mapping[str, float]:
            for _ in range(repeats):
                here.await_signal(0)
                posted = [way.receive(message, 0) for _ in range(count)]
                for finish in posted:
                    finish()
                here.signal(0)
            return {}

        return measure if here.rank == 0 else consume
