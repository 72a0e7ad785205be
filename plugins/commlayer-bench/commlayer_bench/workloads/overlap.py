"""A pipelined decode: two stages that compute while the message before is on its way."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from commlayer_bench.compute import Compute, on_a_device, on_the_host, seconds_of
from commlayer_bench.contender import Contender
from commlayer_bench.contenders import plain
from commlayer_bench.exchange import answer, send
from commlayer_bench.payloads import KIB, MIB, size_text, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload

IN_FLIGHT = 4
"""Micro-batches between the first stage and the token that comes back."""


class Overlap(Workload):
    """The time of a step, relative to computing alone.

    Computing takes as long as the plain transfer with its reply, measured just
    before, so it is the larger of the two: 1 is a transfer that costs nothing.
    On a device the host waits for the computation; on the host it takes a core
    of the same machine that moves the bytes, so that 1 is out of reach there.
    """

    name = "overlap"
    title = "Pipelined decode over two stages, a step relative to its compute"
    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {"step": ""}
    steps = 24

    def __init__(self) -> None:
        self._computes: dict[str, tuple[Compute, float]] = {}

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        sizes = (KIB,) if scale is Scale.tiny else (64 * KIB, MIB, 4 * MIB)
        return [
            Case(f"2 × {size_text(size)}, {where}", 2 * size)
            for where in ("device", "host")
            for size in sizes
        ]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get("dict")
        if way is None or contender.driven:
            return None
        message = two_tensors(int(case.x) // 2)
        if case.label not in self._computes:
            self._computes[case.label] = _calibrated(case, message, here)
        compute, alone = self._computes[case.label]

        def first() -> Mapping[str, float]:
            begin = here.now()
            posted = []
            for step in range(self.steps):
                if step >= IN_FLIGHT:
                    here.await_signal(1)
                compute()
                posted.append(way.send(message, 1))
            for _ in range(min(IN_FLIGHT, self.steps)):
                here.await_signal(1)
            end = here.now()
            for finish in posted:
                finish()
            return {"step": (end - begin) / self.steps / alone}

        def second() -> Mapping[str, float]:
            signals = []
            pending = way.receive(message, 0)
            for step in range(self.steps):
                pending()
                if contender.early and step + 1 < self.steps:
                    pending = way.receive(message, 0)
                compute()
                signals.append(here.post_signal(0))
                if not contender.early and step + 1 < self.steps:
                    pending = way.receive(message, 0)
            for signal in signals:
                signal.wait()
            return {}

        return first if here.rank == 0 else second


def _calibrated(case: Case, message: Any, here: Here) -> tuple[Compute, float]:
    """A computation as long as the plain transfer of `message`, and how long it takes alone."""
    way = plain.connect("plain").ways["dict"]
    times = []
    for _ in range(20):
        if here.rank == 0:
            times.append(send(way, message, here).replied)
        else:
            answer(way, message, here)
    (transfer,) = here.agree([statistics.median(times) if times else 0.0])
    make = on_a_device if case.label.endswith("device") else on_the_host
    compute = make(transfer)
    (alone,) = here.agree([statistics.median([seconds_of(compute) for _ in range(20)])])
    return compute, alone
