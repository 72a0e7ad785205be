"""Figures for Prometheus, through prometheus-client (extra ``commlayer[metrics]``).

The data path counts into plain numbers under one lock; metric families are made
when a registry is collected, which the host's own endpoint does, or to be
written to files (`multiprocess`).
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from commlayer.errors import CommError, ErrorKind
from commlayer.lanes.connection import Connection
from commlayer.observe.multiprocess import Files
from commlayer.observe.spans import Span
from commlayer.progress.ledger import OperationView
from commlayer.progress.operation import LaneKey, Operation

logger = logging.getLogger("commlayer")

BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms, in seconds."""

_CONNECTION = ("connection", "rank", "backend")
_FLOW = (*_CONNECTION, "channel", "peer", "direction")

Flow = tuple[str, str, str]
"""Channel, peer and direction: what figures are kept by."""


class Histogram:
    """Counts by upper bound, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum


class _Totals:
    """What was counted for one lane, or one flow."""

    __slots__ = ("bytes", "completed", "failed", "reap", "wait")

    def __init__(self) -> None:
        self.completed = 0
        self.failed: dict[str, int] = {}
        self.bytes = 0
        self.reap = Histogram()
        self.wait = Histogram()

    def add(self, other: _Totals) -> None:
        self.completed += other.completed
        for kind, count in other.failed.items():
            self.failed[kind] = self.failed.get(kind, 0) + count
        self.bytes += other.bytes
        self.reap.add(other.reap)
        self.wait.add(other.wait)


class Metrics:
    """Counts one connection, in the default registry until closed.  A sink of `Spans`.

    Raises `CommError` (UNSUPPORTED) where prometheus-client is not installed.
    """

    def __init__(self, connection: Connection, backend: str, name: str) -> None:
        self.connection = connection
        self.labels = (name, str(connection.rank), backend)
        self._lock = connection.runtime.lock()
        self._totals: defaultdict[LaneKey, _Totals] = defaultdict(_Totals)
        self.stalls = 0
        self.process = os.getpid()
        self._collector = _Collector.the()
        self._collector.live.append(self)

    def finished(self, span: Span) -> None:
        with self._lock:
            totals = self._totals[span.lane]
            if span.error:
                totals.failed[span.error] = totals.failed.get(span.error, 0) + 1
            else:
                totals.completed += 1
                totals.bytes += span.nbytes
            totals.reap.observe(max(0.0, span.released - span.settled))

    def waited(self, operation: Operation, since: float, until: float) -> None:
        with self._lock:
            self._totals[operation.lane].wait.observe(until - since)

    def by_flow(self) -> dict[Flow, _Totals]:
        """What was counted so far."""
        flows: defaultdict[Flow, _Totals] = defaultdict(_Totals)
        with self._lock:
            for lane, totals in self._totals.items():
                flows[lane.channel, str(lane.peer), lane.direction].add(totals)
        return flows

    @property
    def in_files(self) -> bool:
        """Whether somebody has to call `publish` for the figures to be seen."""
        return self._collector.files is not None

    def publish(self) -> None:
        """Write the figures of all connections of this process to files, in that mode."""
        self._collector.publish()

    def close(self) -> None:
        """Leave the registry; in files, counters stay."""
        if self in self._collector.live:
            self.publish()
            self._collector.live.remove(self)
            self.publish()


_registering = threading.Lock()


class _Collector:
    """All connections of the process, as one collector: a family must appear once."""

    _instance: _Collector | None = None

    def __init__(self, core: Any) -> None:
        self._core = core
        self.live: list[Metrics] = []
        self.files = Files.open()

    @classmethod
    def the(cls) -> _Collector:
        """The one of this process, registered at its first use, by whichever thread it is."""
        try:
            from prometheus_client import REGISTRY, core
        except ImportError as error:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                "metrics",
                "prometheus-client is not installed",
                "pip install 'commlayer[metrics]', or leave `metrics` off",
            ) from error
        with _registering:
            if cls._instance is None:
                cls._instance = cls(core)
                REGISTRY.register(cls._instance)
            return cls._instance

    def publish(self) -> None:
        """Write the families to files, in that mode; a failure is logged and ends it."""
        if self.files is not None:
            try:
                self.files.write(self.collect())
            except Exception:
                self.files = None
                logger.exception("commlayer: no figures in PROMETHEUS_MULTIPROC_DIR any more")

    def describe(self) -> list[Any]:
        """Nothing: names are known when there is a connection."""
        return []

    def collect(self) -> Iterator[Any]:
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        histogram = self._core.HistogramMetricFamily
        in_flight = gauge(
            "commlayer_operations_in_flight", "Operations not released.", labels=_FLOW
        )
        bytes_ = gauge("commlayer_bytes_in_flight", "Bytes of those operations.", labels=_FLOW)
        oldest = gauge(
            "commlayer_oldest_operation_seconds", "Age of the oldest that is pending.", labels=_FLOW
        )
        completed = counter("commlayer_operations_completed", "Completed well.", labels=_FLOW)
        moved = counter("commlayer_bytes_completed", "Bytes of those.", labels=_FLOW)
        failed = counter("commlayer_operations_failed", "Failed.", labels=(*_FLOW, "kind"))
        reap = histogram(
            "commlayer_reap_seconds", "From completion to release of the buffers.", labels=_FLOW
        )
        wait = histogram("commlayer_wait_seconds", "Threads blocked in waits.", labels=_FLOW)
        retained = gauge(
            "commlayer_retained_bytes", "Bytes of sends whose buffers are held.", labels=_CONNECTION
        )
        given_up = gauge(
            "commlayer_quarantined_operations",
            "Operations given up while the transport holds their buffers.",
            labels=_CONNECTION,
        )
        stalls = counter("commlayer_stalls", "Stall reports made.", labels=_CONNECTION)
        lost = gauge("commlayer_peers_lost", "Peers dead or unreachable.", labels=_CONNECTION)
        own = [metrics for metrics in self.live if metrics.process == os.getpid()]
        for metrics in own:  # a fork inherits the others, with locks that nobody will let go
            snapshot = metrics.connection.ledger.snapshot()
            for flow, operations in _by_flow(snapshot.operations).items():
                labels = (*metrics.labels, *flow)
                ages = [each.age for each in operations if each.state == "pending"]
                in_flight.add_metric(labels, len(operations))
                bytes_.add_metric(labels, sum(each.nbytes for each in operations))
                oldest.add_metric(labels, max(ages, default=0.0))
            for flow, totals in metrics.by_flow().items():
                labels = (*metrics.labels, *flow)
                completed.add_metric(labels, totals.completed)
                moved.add_metric(labels, totals.bytes)
                for kind, count in totals.failed.items():
                    failed.add_metric((*labels, kind), count)
                reap.add_metric(labels, _buckets(totals.reap), totals.reap.sum)
                wait.add_metric(labels, _buckets(totals.wait), totals.wait.sum)
            peers = metrics.connection.peers.values()
            retained.add_metric(metrics.labels, snapshot.bytes)
            given_up.add_metric(metrics.labels, len(snapshot.quarantined))
            stalls.add_metric(metrics.labels, metrics.stalls)
            lost.add_metric(metrics.labels, sum(peer.lost for peer in peers))
        yield from (in_flight, bytes_, oldest, completed, moved, failed, reap, wait)
        yield from (retained, given_up, stalls, lost)


def _by_flow(operations: tuple[OperationView, ...]) -> dict[Flow, list[OperationView]]:
    flows: defaultdict[Flow, list[OperationView]] = defaultdict(list)
    for each in operations:
        flows[each.channel, str(each.peer), each.direction].append(each)
    return flows


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    bounds = [*map(str, BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
