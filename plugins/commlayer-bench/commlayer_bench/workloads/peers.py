"""One rank that sends to several."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import ClassVar

from commlayer_bench.contender import Contender
from commlayer_bench.payloads import KIB, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload


class Peers(Workload):
    """A dict of two tensors of 1 KiB to each peer and its reply, per peer."""

    name = "peers"
    title = "A dict of two tensors of 1 KiB to each of several peers and their replies, per peer"
    axis = "peers"
    metrics: ClassVar[Mapping[str, str]] = {"per peer": "s"}
    count = 20

    def worlds(self, scale: Scale) -> Sequence[int]:
        return {Scale.tiny: (3,), Scale.quick: (2, 3, 5), Scale.full: (2, 3, 5, 9)}[scale]

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        return [Case(str(ranks - 1), ranks - 1)]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("dict")
        if way is None or contender.driven:
            return None
        message = two_tensors(KIB)
        peers = range(1, here.size)

        def exchange() -> float:
            begin = here.now()
            posted = [way.send(message, peer) for peer in peers]
            for peer in peers:
                here.await_signal(peer)
            end = here.now()
            for finish in posted:
                finish()
            return (end - begin) / len(peers)

        def measure() -> Mapping[str, float]:
            return {"per peer": statistics.median([exchange() for _ in range(self.count)])}

        def consume() -> Mapping[str, float]:
            for _ in range(self.count):
                way.receive(message, 0)()
                here.signal(0)
            return {}

        return measure if here.rank == 0 else consume
