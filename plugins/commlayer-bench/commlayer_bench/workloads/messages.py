"""One message to its consumer and a one-byte reply; several at once, for the throughput."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from commlayer_bench.contender import Contender, Kind
from commlayer_bench.exchange import answer, send
from commlayer_bench.payloads import KIB, MIB, one_tensor, size_text, step_plan, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload


class Messages(Workload):
    """Messages of one kind, by size.

    ``latency`` is the time from the caller's post to the reply of a consumer that
    has the message, ``throughput`` that of several messages with one reply.
    """

    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {"latency": "s", "throughput": "B/s"}

    def __init__(
        self,
        name: str,
        title: str,
        kind: Kind,
        make: Callable[[int], Any],
        sizes: Mapping[Scale, Sequence[int]],
        tensors: int = 1,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.title = title  # type: ignore[misc]
        self._kind = kind
        self._make = make
        self._sizes = sizes
        self._tensors = tensors

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        several = f"{self._tensors} × " if self._tensors > 1 else ""
        return [
            Case(several + size_text(size), self._tensors * size) for size in self._sizes[scale]
        ]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        way = contender.ways.get(self._kind)
        if way is None:
            return None
        nbytes = int(case.x)
        message = self._make(nbytes // self._tensors)
        single = max(5, min(40, 40 * MIB // nbytes))
        burst = max(4, min(32, 32 * MIB // nbytes))
        target = 0 if self._kind == "broadcast" else 1

        def exchange(count: int) -> float:
            return send(way, message, here, to=target, count=count, driven=contender.driven).replied

        def measure() -> Mapping[str, float]:
            latency = statistics.median([exchange(1) for _ in range(single)])
            return {"latency": latency, "throughput": nbytes * burst / exchange(burst)}

        def consume() -> Mapping[str, float]:
            for count in [1] * single + [burst]:
                answer(way, message, here, count=count)
            return {}

        return measure if here.rank == 0 else consume


MESSAGES = (
    Messages(
        "tensor",
        "One tensor to its consumer and a one-byte reply",
        "tensor",
        one_tensor,
        {
            Scale.tiny: (KIB,),
            Scale.quick: (KIB, 64 * KIB, MIB),
            Scale.full: (64, KIB, 8 * KIB, 64 * KIB, 512 * KIB, 4 * MIB, 32 * MIB),
        },
    ),
    Messages(
        "object",
        "A Python value to its consumer and a one-byte reply",
        "object",
        step_plan,
        {
            Scale.tiny: (64,),
            Scale.quick: (64, 4 * KIB),
            Scale.full: (64, 512, 4 * KIB, 32 * KIB, 256 * KIB),
        },
    ),
    Messages(
        "dict",
        "A dict of two tensors to its consumer and a one-byte reply",
        "dict",
        two_tensors,
        {
            Scale.tiny: (KIB,),
            Scale.quick: (KIB, 64 * KIB, MIB),
            Scale.full: (KIB, 8 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB),
        },
        tensors=2,
    ),
    Messages(
        "broadcast",
        "A broadcast of a tensor and a one-byte reply",
        "broadcast",
        one_tensor,
        {
            Scale.tiny: (64,),
            Scale.quick: (64, 64 * KIB),
            Scale.full: (64, KIB, 64 * KIB, MIB),
        },
    ),
)
