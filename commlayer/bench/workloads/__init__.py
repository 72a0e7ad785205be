"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping

from commlayer.bench.workload import Workload
from commlayer.bench.workloads.alone import Import, NullHandle
from commlayer.bench.workloads.breakdown import Breakdown
from commlayer.bench.workloads.in_flight import InFlight
from commlayer.bench.workloads.late import LateWait
from commlayer.bench.workloads.messages import MESSAGES
from commlayer.bench.workloads.observing import Observing
from commlayer.bench.workloads.overlap import Overlap
from commlayer.bench.workloads.peers import Peers
from commlayer.bench.workloads.post import Post
from commlayer.bench.workloads.shapes import Schemas, TensorsPerDict

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
