"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping

from commlayer_bench.workload import Workload
from commlayer_bench.workloads.alone import Import, NullHandle
from commlayer_bench.workloads.breakdown import Breakdown
from commlayer_bench.workloads.in_flight import InFlight
from commlayer_bench.workloads.late import LateWait
from commlayer_bench.workloads.messages import MESSAGES
from commlayer_bench.workloads.observing import Observing
from commlayer_bench.workloads.overlap import Overlap
from commlayer_bench.workloads.peers import Peers
from commlayer_bench.workloads.post import Post
from commlayer_bench.workloads.shapes import Schemas, TensorsPerDict

WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        *MESSAGES,
        Post(),
        LateWait(),
        Overlap(),
        InFlight(),
        TensorsPerDict(),
        Schemas(),
        Peers(),
        NullHandle(),
        Import(),
        Observing(),
        Breakdown(),
    )
}
