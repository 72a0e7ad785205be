"""What being observed costs: recorder, metrics, liveness and stall reports, on against off."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from commlayer_bench.contender import Contender
from commlayer_bench.contenders.commlayer import MODES, known, settings, ways
from commlayer_bench.exchange import answer, send
from commlayer_bench.payloads import KIB, size_text, two_tensors
from commlayer_bench.workload import Case, Here, Scale, Turn, Workload

OFF, ON = "everything off", "everything on"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    OFF: {"peer_timeout": 0.0, "stall_timeout": 0.0, "recorder_size": 0, "metrics": False},
    ON: {"peer_timeout": 5.0, "stall_timeout": 60.0, "recorder_size": 4096, "metrics": True},
}


class Observing(Workload):
    """A dict to its consumer and a one-byte reply, in both wait modes.

    Metrics are on only where prometheus-client is installed.
    """

    name = "observing"
    title = "A dict and its reply with recorder, metrics, liveness and stall reports, or without"
    axis = "bytes in a message"
    metrics: ClassVar[Mapping[str, str]] = {"latency": "s"}
    base = OFF
    count = 40

    def cases(self, scale: Scale, ranks: int) -> Sequence[Case]:
        sizes = (KIB,) if scale is Scale.tiny else (KIB, 64 * KIB)
        return [
            Case(f"2 × {size_text(size)}, {MODES[mode].get('wait_mode', 'safe')}", 2 * size)
            for size in sizes
            for mode in MODES
            if known(mode)
        ]

    def turns(
        self, case: Case, contenders: Sequence[Contender], here: Here
    ) -> Sequence[tuple[str, Turn]]:
        (mode,) = (m for m in MODES if case.label.endswith(MODES[m].get("wait_mode", "safe")))
        return [
            (name, self._turn({**settings(mode), **extra}, case, here))
            for name, extra in SETTINGS.items()
        ]

    def _turn(self, config: dict[str, Any], case: Case, here: Here) -> Turn:
        from commlayer.bootstrap import connector

        if importlib.util.find_spec("prometheus_client") is None:
            config["metrics"] = False
        message = two_tensors(int(case.x) // 2)

        def turn() -> Mapping[str, float]:
            with connector.connect(config) as comm:
                way = ways(comm)["dict"]
                if here.rank == 0:
                    times = [send(way, message, here).replied for _ in range(2 * self.count)]
                    return {"latency": statistics.median(times[self.count :])}
                for _ in range(2 * self.count):
                    answer(way, message, here)
                return {}

        return turn
