"""Where the time of one dict goes, from the caller's post to the consumer's result."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

from commlayer_bench.contender import Contender, Way
from commlayer_bench.contenders import FLOOR
from commlayer_bench.contenders.commlayer import MODES, settings, ways
from commlayer_bench.payloads import KIB, MIB, size_text, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload

if TYPE_CHECKING:
    from commlayer_bench.traced import Stamp


class Breakdown(Workload):
    """Both processes read one clock, so that a message can be followed across them.

    The parts up to ``hand over`` add up to ``all``: describing and encoding until
    the first native send; until the first native wait of the receiver returns
    (``header``); until the last one does (``payload``); until the consumer has the
    dict (``hand over``).  ``post returns`` is beside them: when the sender goes on.
    ``sends`` and ``receives`` count native operations.
    """

    name = "breakdown"
    title = "Where the time of a dict goes"
    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {
        "encode": "s",
        "header": "s",
        "payload": "s",
        "hand over": "s",
        "all": "s",
        "post returns": "s",
        "sends": "",
        "receives": "",
    }
    in_parts = True
    count = 20

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        sizes = (KIB,) if scale is Scale.tiny else (KIB, MIB)
        return [Case(f"2 × {size_text(size)}", 2 * size) for size in sizes]

    def prepare(self, case: Case, contender: Contender, here: Here) -> Turn | None:
        message = two_tensors(int(case.x) // 2)
        if contender.name == FLOOR:
            return lambda: _exchanges(self.count, contender.ways["dict"], message, [], here)
        if contender.name in MODES:
            return lambda: self._traced(contender.name, message, here)
        return None

    def _traced(self, name: str, message: Any, here: Here) -> Mapping[str, float]:
        from commlayer_bench import traced

        stamps: list[Stamp] = []
        with traced.connect(settings(name), stamps) as comm:
            way = ways(comm)["dict"]
            _exchanges(10, way, message, stamps, here)
            return _exchanges(self.count, way, message, stamps, here)


def _exchanges(
    count: int, way: Way, message: Any, stamps: list[Stamp], here: Here
) -> Mapping[str, float]:
    """The medians of `count` messages; those of rank 0 are whole."""
    marks: list[tuple[float, float]] = []
    for _ in range(count):
        begin = here.now()
        if here.rank == 0:
            finish = way.send(message, 1)
            marks.append((begin, here.now()))
            here.await_signal(1)
            finish()
        else:
            way.receive(message, 0)()
            marks.append((begin, here.now()))
            here.signal(0)
    sides: list[Any] = [None] * here.size
    dist.all_gather_object(sides, (marks, [tuple(stamp) for stamp in stamps]))
    (sent, sender), (received, receiver) = sides
    parts: dict[str, list[float]] = defaultdict(list)
    for (begin, returned), (_, result) in zip(sent, received, strict=True):
        parts["all"].append(result - begin)
        parts["post returns"].append(returned - begin)
        sends = [start for call, start, _ in sender if call == "isend" and begin < start < result]
        arrivals = [end for call, _, end in receiver if call == "wait" and begin < end < result]
        receives = [1 for call, at, _ in receiver if call == "irecv" and begin < at < result]
        if sends and arrivals:
            parts["encode"].append(sends[0] - begin)
            parts["header"].append(arrivals[0] - sends[0])
            parts["payload"].append(arrivals[-1] - arrivals[0])
            parts["hand over"].append(result - arrivals[-1])
            parts["sends"].append(len(sends))
            parts["receives"].append(len(receives))
    return {name: statistics.median(values) for name, values in parts.items()}
