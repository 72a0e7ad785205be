"""Figures for Prometheus, through prometheus-client (extra ``commlayer[metrics]``).

The data path counts into plain numbers under one lock; metric families are made
when a registry is collected, which the host's own endpoint does, or to be
written to files (`multiprocess`).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import accumulate
from typing import Any

from commlayer.errors import CommError, ErrorKind
from commlayer.forks import let_go_in_child
from commlayer.lanes.connection import Connection
from commlayer.observe.peers import lost_ranks
from commlayer.observe.spans import Span
from commlayer.progress.operation import LaneKey, Operation
from commlayer.progress.snapshot import OperationView
from commlayer_metrics.files import Files

logger = logging.getLogger("commlayer")

BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms, in seconds."""

_CONNECTION = ("connection", "rank", "backend")
_FLOW = (*_CONNECTION, "channel", "peer", "direction")

Labels = tuple[str, str, str]
"""Connection, rank and backend."""
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


class _Figures:
    """Counters of one connection, or of all that have had its labels."""

    def __init__(self) -> None:
        self.flows: defaultdict[Flow, _Totals] = defaultdict(_Totals)
        self.stalls = 0
        self.losses = 0

    def add(self, other: _Figures) -> None:
        for flow, totals in other.flows.items():
            self.flows[flow].add(totals)
        self.stalls += other.stalls
        self.losses += other.losses


class Metrics:
    """Counts one connection, in the default registry.  A sink of `Spans`.

    What was counted stays there after `close`, and a later connection of the same
    labels goes on from it.  Receives on `may_idle` channels have no age.  Raises
    `CommError` (UNSUPPORTED) where prometheus-client is not installed.
    """

    def __init__(
        self, connection: Connection, backend: str, name: str, may_idle: Collection[str] = ()
    ) -> None:
        self.connection = connection
        self.name = name
        self.backend = backend
        self.may_idle = may_idle
        self._lock = connection.runtime.lock()
        self._totals: defaultdict[LaneKey, _Totals] = defaultdict(_Totals)
        self.stalls = 0
        self._collector = _Collector.the()
        self.labels = self._collector.enter(self)

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

    def counted(self) -> _Figures:
        """What was counted so far."""
        figures = _Figures()
        figures.stalls = self.stalls
        figures.losses = self.lost
        with self._lock:
            for lane, totals in self._totals.items():
                figures.flows[lane.channel, str(lane.peer), lane.direction].add(totals)
        return figures

    @property
    def lost(self) -> int:
        """How many peers are lost, or have left by an error."""
        return len(lost_ranks(self.connection.peers))

    @property
    def in_files(self) -> bool:
        """Whether somebody has to call `publish` for the figures to be seen."""
        return self._collector.files is not None

    def publish(self) -> None:
        """Write the figures of all connections of this process to files, in that mode."""
        self._collector.publish()

    def close(self) -> None:
        """Take the gauges out of the registry; counters stay as they are.  Once."""
        self._collector.leave(self)
        self._collector.publish()


_registering = let_go_in_child(threading.Lock())


class _Collector:
    """All connections of the process, as one collector: a family must appear once."""

    _instance: _Collector | None = None

    def __init__(self, core: Any) -> None:
        self._core = core
        self.files = Files.open()
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._live: list[Metrics] = []
        self._past: defaultdict[Labels, _Figures] = defaultdict(_Figures)
        """What connections that are closed have counted."""

    def _own(self) -> None:
        """Begin anew in a forked child: what it has inherited is its parent's, locks included."""
        if self._process != os.getpid():
            self._begin()

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
            cls._instance._own()
            return cls._instance

    def enter(self, metrics: Metrics) -> Labels:
        """Add a connection; returns its labels.

        A second open connection of one name is NAME.2, as in the files of the flight
        recorder; once the first is closed, the next one is NAME again.
        """
        with self._lock:
            for number in itertools.count(1):
                name = metrics.name if number == 1 else f"{metrics.name}.{number}"
                if not any(_in_the_way(name, other, metrics) for other in self._live):
                    break
            self._live.append(metrics)
        return name, str(metrics.connection.rank), metrics.backend

    def leave(self, metrics: Metrics) -> None:
        """Keep what a connection has counted, without the connection."""
        self._own()
        with self._lock:
            if metrics in self._live:
                self._live.remove(metrics)
                self._past[metrics.labels].add(metrics.counted())

    def _counted(self) -> tuple[list[Metrics], dict[Labels, _Figures]]:
        """The open connections, and the counters of all that there have been."""
        self._own()
        counted: defaultdict[Labels, _Figures] = defaultdict(_Figures)
        with self._lock:
            live = list(self._live)
            for labels, figures in self._past.items():
                counted[labels].add(figures)
            for metrics in live:
                counted[metrics.labels].add(metrics.counted())
        return live, counted

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
        losses = counter("commlayer_peer_losses", "Peers lost so far.", labels=_CONNECTION)
        lost = gauge("commlayer_peers_lost", "Peers dead or unreachable.", labels=_CONNECTION)
        live, counted = self._counted()
        for metrics in live:
            snapshot = metrics.connection.ledger.snapshot()
            for flow, operations in _by_flow(snapshot.operations).items():
                labels = (*metrics.labels, *flow)
                in_flight.add_metric(labels, len(operations))
                bytes_.add_metric(labels, sum(each.nbytes for each in operations))
                oldest.add_metric(labels, _oldest(operations, metrics.may_idle))
            retained.add_metric(metrics.labels, snapshot.bytes)
            given_up.add_metric(metrics.labels, len(snapshot.quarantined))
            lost.add_metric(metrics.labels, metrics.lost)
        for connection, figures in counted.items():
            for flow, totals in figures.flows.items():
                labels = (*connection, *flow)
                completed.add_metric(labels, totals.completed)
                moved.add_metric(labels, totals.bytes)
                for kind, count in totals.failed.items():
                    failed.add_metric((*labels, kind), count)
                reap.add_metric(labels, _buckets(totals.reap), totals.reap.sum)
                wait.add_metric(labels, _buckets(totals.wait), totals.wait.sum)
            stalls.add_metric(connection, figures.stalls)
            losses.add_metric(connection, figures.losses)
        yield from (in_flight, bytes_, oldest, completed, moved, failed, reap, wait)
        yield from (retained, given_up, stalls, losses, lost)


def _in_the_way(name: str, other: Metrics, metrics: Metrics) -> bool:
    """Whether `other` keeps `metrics` from the name.

    Two ranks of one connection in one process share theirs; they are of one size.
    """
    if other.labels[0] != name:
        return False
    mine, theirs = metrics.connection, other.connection
    return mine.rank == theirs.rank or mine.size != theirs.size


def _oldest(operations: list[OperationView], may_idle: Collection[str]) -> float:
    ages = [
        each.age
        for each in operations
        if each.state == "pending" and not (each.direction == "recv" and each.channel in may_idle)
    ]
    return max(ages, default=0.0)


def _by_flow(operations: tuple[OperationView, ...]) -> dict[Flow, list[OperationView]]:
    flows: defaultdict[Flow, list[OperationView]] = defaultdict(list)
    for each in operations:
        flows[each.channel, str(each.peer), each.direction].append(each)
    return flows


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    bounds = [*map(str, BUCKETS), "+Inf"]
    return list(zip(bounds, accumulate(histogram.counts), strict=True))
