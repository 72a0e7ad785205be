"""Figures in the registry of prometheus-client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commlayer_metrics.figures import BUCKETS, Histogram
from commlayer_testkit.local import Hub, connect_rank, connected, eventually

from commlayer import CommError, Communicator, ErrorKind
from commlayer.observe import exporter

prometheus = pytest.importorskip("prometheus_client", reason="the extra `metrics` is missing")
multiprocess = pytest.importorskip("prometheus_client.multiprocess")

LARGE = 1 << 16


def value(name: str, comm: Communicator, **labels: str) -> float | None:
    """A sample of `comm` in the default registry; ``None`` if there is none."""
    fixed = {"connection": comm.config.name, "rank": str(comm.rank), "backend": "local"}
    found: float | None = prometheus.REGISTRY.get_sample_value(name, {**fixed, **labels})
    return found


def to(peer: int, direction: str, channel: str = "data") -> dict[str, str]:
    return {"peer": str(peer), "direction": direction, "channel": channel}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Communicator, Communicator]]:
    """Two ranks whose figures no other test counts into: counters survive their connection."""
    with connected(2, metrics=True, name=request.node.name) as (a, b):
        yield a, b


def test_what_is_complete(pair: tuple[Communicator, Communicator]) -> None:
    a, b = pair
    for size in (4, LARGE):
        handle = a.isend(torch.ones(size, dtype=torch.uint8), 1)
        b.recv(None, 0)
        handle.wait(20)
    sent, received = to(1, "send"), to(0, "recv")
    assert value("commlayer_operations_completed_total", a, **sent) == 2
    assert value("commlayer_operations_completed_total", b, **received) == 2
    for comm, flow in ((a, sent), (b, received)):
        moved = value("commlayer_bytes_completed_total", comm, **flow)
        assert moved is not None
        assert LARGE < moved < LARGE + 1000
    assert value("commlayer_reap_seconds_count", a, **sent) == 2
    assert value("commlayer_reap_seconds_bucket", a, le="+Inf", **sent) == 2
    assert value("commlayer_operations_in_flight", a, **sent) is None
    assert value("commlayer_retained_bytes", a) == 0
    assert value("commlayer_peers_lost", a) == value("commlayer_stalls_total", a) == 0


def test_what_is_in_flight(pair: tuple[Communicator, Communicator]) -> None:
    a, b = pair
    handles = [a.isend(torch.ones(LARGE, dtype=torch.uint8), 1) for _ in range(3)]
    receive = a.irecv_object(1)
    sent = to(1, "send")
    assert value("commlayer_operations_in_flight", a, **sent) == 3
    assert value("commlayer_operations_in_flight", a, **to(1, "recv")) == 1
    held = value("commlayer_bytes_in_flight", a, **sent)
    assert held is not None
    assert held >= 3 * LARGE
    assert value("commlayer_retained_bytes", a) == held
    age = value("commlayer_oldest_operation_seconds", a, **sent)
    assert age is not None
    assert age > 0
    for _ in handles:
        b.recv(None, 0)
    b.send_object(1, 0)
    receive.wait(20)
    a.drain(20)
    assert value("commlayer_operations_in_flight", a, **sent) is None
    assert value("commlayer_operations_completed_total", a, **sent) == 3


def test_waits_are_counted_on_both_ends(pair: tuple[Communicator, Communicator]) -> None:
    a, b = pair
    receive = a.irecv_object(1)
    with pytest.raises(CommError):
        receive.wait(0.05)
    waited = value("commlayer_wait_seconds_sum", a, **to(1, "recv"))
    assert waited is not None
    assert waited >= 0.04
    assert value("commlayer_wait_seconds_count", a, **to(1, "recv")) == 1
    b.send_object(1, 0)
    receive.wait(20)


def test_failures_by_kind_and_lost_peers() -> None:
    hub = Hub(2)
    with connected(hub=hub, metrics=True) as (a, b):
        a.isend_object("x", 1)
        b.recv_object(0)
        receive = a.irecv_object(1)
        hub.kill(1)
        with pytest.raises(CommError):
            receive.wait(20)
        failed = value("commlayer_operations_failed_total", a, kind="peer_lost", **to(1, "recv"))
        assert failed == 1
        assert value("commlayer_peers_lost", a) == 1


def test_counters_survive_close_and_a_later_connection_goes_on_from_them() -> None:
    sent, name = to(1, "send"), "of-two-generations"
    for generation in (1, 2):
        with connected(2, metrics=True, name=name) as (a, b):
            a.isend_object("x", 1)
            b.recv_object(0)
            a.drain(20)
            assert value("commlayer_retained_bytes", a) == 0
        assert value("commlayer_operations_completed_total", a, **sent) == generation
        assert value("commlayer_reap_seconds_count", a, **sent) == generation
        assert value("commlayer_stalls_total", a) == 0
        assert value("commlayer_retained_bytes", a) is None, "gauges are gone"


def test_a_loss_can_be_scraped_after_the_connection_was_closed() -> None:
    hub, name = Hub(2), "of-an-incident"
    with connected(hub=hub, metrics=True, name=name) as (a, _):
        receive = a.irecv_object(1)
        hub.kill(1)
        with pytest.raises(CommError):
            receive.wait(20)
    failed = value("commlayer_operations_failed_total", a, kind="peer_lost", **to(1, "recv"))
    assert failed == 1
    assert value("commlayer_peer_losses_total", a) == 1


def test_two_open_connections_of_one_name_are_counted_apart() -> None:
    sent, settings = to(1, "send"), {"metrics": True, "name": "of-two-worlds"}
    with connected(2, **settings) as (a, b), connected(3, **settings) as (c, d, _):
        for sender, receiver, count in ((a, b, 1), (c, d, 2)):
            for _ in range(count):
                sender.isend_object("x", 1)
                receiver.recv_object(0)
            sender.drain(20)
        second = {"connection": "of-two-worlds.2", **sent}
        assert value("commlayer_operations_completed_total", a, **sent) == 1
        assert value("commlayer_operations_completed_total", c, **second) == 2
        lines = prometheus.generate_latest().decode().splitlines()
        series = [line.rpartition(" ")[0] for line in lines if line.startswith("commlayer_")]
        assert len(series) == len(set(series))
    with connected(2, **settings) as (a, b):
        a.isend_object("x", 1)
        b.recv_object(0)
        a.drain(20)
        assert value("commlayer_operations_completed_total", a, **sent) == 2


def test_receives_that_may_idle_have_no_age() -> None:
    with connected(2, metrics=True, channels={"requests": {"may_idle": True}}) as (a, b):
        receive = a.channel("requests").irecv_object(1)
        other = a.irecv_object(1)
        idle, due = to(1, "recv", "requests"), to(1, "recv")
        assert value("commlayer_operations_in_flight", a, **idle) == 1
        assert value("commlayer_oldest_operation_seconds", a, **idle) == 0
        age = value("commlayer_oldest_operation_seconds", a, **due)
        assert age is not None
        assert age > 0
        b.channel("requests").send_object(1, 0)
        b.send_object(1, 0)
        assert receive.result(20) == other.result(20) == 1


def test_connections_of_one_process_share_families(
    pair: tuple[Communicator, Communicator],
) -> None:
    exposed = prometheus.generate_latest().decode().splitlines()
    assert sum(line.startswith("# TYPE commlayer_retained_bytes") for line in exposed) == 1
    assert sum(line.startswith("commlayer_retained_bytes{") for line in exposed) == 2


@pytest.mark.parametrize(
    ("seconds", "place"), [(0.0, 0), (1e-4, 0), (1.1e-4, 1), (99.0, len(BUCKETS))]
)
def test_buckets_hold_what_is_at_most_their_bound(seconds: float, place: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.counts.index(1) == place
    assert histogram.sum == seconds


def test_without_the_package_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from commlayer_testkit.local import Hub, connect_rank
connect_rank(Hub(1), 0, metrics=True)
"""
    said = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}{program}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "pip install 'commlayer[metrics]'" in said.stderr
    assert ErrorKind.UNSUPPORTED.value in said.stderr.lower() or "not installed" in said.stderr


def test_without_the_distribution_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(CommError, match=r"pip install 'commlayer\[metrics\]'"):
        connect_rank(Hub(1), 0, metrics=True)


SEVERAL_PROCESSES = """
from commlayer_testkit.local import connected
with connected(2, metrics=True, stall_timeout=0.2) as (a, b):
    for _ in range(3):
        a.isend_object("x", 1)
        b.recv_object(0)
    receive = a.irecv_object(1)
    print("ready", flush=True)
    input()
    b.send_object("y", 0)
    receive.wait(20)
"""


def test_another_process_serves_the_files_of_the_multiprocess_mode(tmp_path: Path) -> None:
    registry = prometheus.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, str(tmp_path))

    def served(name: str, **labels: str) -> float | None:
        fixed = {"connection": "commlayer", "rank": "0", "backend": "local"}
        found: float | None = registry.get_sample_value(name, {**fixed, **labels})
        return found

    sent, received = to(1, "send"), to(1, "recv")
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}{SEVERAL_PROCESSES}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            assert eventually(
                lambda: (
                    served("commlayer_operations_completed_total", **sent) == 3
                    and served("commlayer_operations_in_flight", **received) == 1
                )
            )
            process.communicate("\n", timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert served("commlayer_operations_completed_total", **received) == 1
    assert served("commlayer_operations_in_flight", **received) == 0
    assert served("commlayer_retained_bytes") == 0
    assert served("commlayer_reap_seconds_count", **sent) == 3
    buckets = [
        served("commlayer_reap_seconds_bucket", le=le, **sent)
        for le in (*map(str, BUCKETS), "+Inf")
    ]
    assert buckets == sorted(buckets, key=float)  # type: ignore[arg-type]
    assert buckets[-1] == 3


def test_files_that_cannot_be_written_are_logged_and_nothing_else(tmp_path: Path) -> None:
    program = """
from commlayer_testkit.local import connected
with connected(2, metrics=True) as (a, b):
    a.isend_object("x", 1)
    assert b.recv_object(0) == "x"
"""
    said = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}{program}"],
        env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "missing")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.returncode == 0
    assert said.stderr.count("no figures in PROMETHEUS_MULTIPROC_DIR any more") == 1
