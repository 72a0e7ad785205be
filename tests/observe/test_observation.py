"""Recorder, reports on demand, events and the monitor, between ranks of one process."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from commlayer_testkit.local import (
    EAGER,
    FUNNELED,
    SERIALIZED,
    WAITED,
    Hub,
    LocalEndpoint,
    Work,
    connect_rank,
    connected,
)
from commlayer_tools.trace import read

from commlayer import CommError, Communicator, ErrorKind
from commlayer.hooks import hookimpl
from commlayer.observe import recorder
from commlayer.observe.events import OperationEvent, StallEvent
from commlayer.observe.recorder import Dump, Record
from commlayer.observe.stall import StallWatch
from commlayer.registry import Registry
from commlayer.semantics import Semantics
from commlayer.wire.control import Answer, Ask, Bye, decode_control, encode_control
from commlayer.wire.rank_state import MAX_OPERATIONS, PendingOperation, RankState

LARGE = 1 << 16

each_transport = pytest.mark.parametrize(
    "semantics", [WAITED, SERIALIZED, EAGER], ids=["waiter", "polling", "eager"]
)


def exchange(a: Communicator, b: Communicator) -> None:
    """A small and a large message each way, and a broadcast."""
    for size in (4, LARGE):
        handles = [a.isend(torch.ones(size), 1), b.isend(torch.ones(size), 0)]
        assert a.recv(None, 1).numel() == b.recv(None, 0).numel() == size
        for handle in handles:
            handle.wait(20)
    b_receives = b.broadcast_object(None, 0, async_op=True)
    a.broadcast_object({"x": 1}, 0)
    assert b_receives.result(20) == {"x": 1}
    a.drain(20)
    b.drain(20)


def test_nothing_observes_unless_asked() -> None:
    with connected(stall_timeout=0) as comms:
        exchange(*comms)
        assert all(comm.ledger.observer is None for comm in comms)
        assert not [t for t in threading.enumerate() if t.name == "commlayer monitor"]
        with pytest.raises(CommError, match="nothing is recorded") as caught:
            comms[0].dump()
        assert caught.value.kind is ErrorKind.CONFIG


@each_transport
@pytest.mark.parametrize("reaping", ["background", "fifo"])
def test_times_are_in_order(semantics: Semantics, reaping: str, tmp_path: Path) -> None:
    with connected(semantics=semantics, recorder_size=64, reaping=reaping) as comms:
        exchange(*comms)
        for comm in comms:
            comm.ledger.reap()
        dumps = [read(comm.dump(tmp_path)) for comm in comms]
    for rank, dump in enumerate(dumps):
        assert (dump.who.rank, dump.who.world_size, dump.who.backend) == (rank, 2, "local")
        began, ended = dump.clocks
        assert dump.open == ()
        assert len(dump.records) == 5
        for record in dump.records:
            assert began.monotonic <= record.posted <= record.settled <= record.released
            assert record.released <= ended.monotonic
            if record.direction == "recv":
                assert record.posted <= record.matched <= record.settled
            assert record.sequence >= 0
            assert record.error == ""
    sent, received = dumps[0].records, dumps[1].records
    assert pairs(sent, "send", 1) == pairs(received, "recv", 0)
    assert [r.step for r in received if r.tag == "broadcast"] == [0]
    assert all(wait.since <= wait.until for wait in dumps[0].blocked)


def pairs(records: tuple[Record, ...], way: str, peer: int) -> list[tuple[str, str, int]]:
    return sorted(
        (r.channel, r.tag, r.sequence) for r in records if (r.direction, r.peer) == (way, peer)
    )


def test_the_ring_keeps_the_last_and_counts_the_rest(tmp_path: Path) -> None:
    with connected(recorder_size=3) as (a, b):
        for step in range(10):
            a.isend_object(step, 1)
            assert b.recv_object(0) == step
        a.drain(20)
        dump = read(a.dump(tmp_path))
    assert [record.sequence for record in dump.records] == [7, 8, 9]
    assert dump.forgotten == 7


def test_what_is_pending_is_dumped_as_open(tmp_path: Path) -> None:
    with connected(recorder_size=8) as (a, b):
        handle = a.irecv_object(1)
        dump = read(a.dump(tmp_path))
        assert [(r.kind, r.peer, r.settled) for r in dump.open] == [("irecv_object", 1, 0.0)]
        b.send_object(1, 0)
        handle.wait(20)


def test_an_operation_that_cannot_be_posted_leaves_nothing(tmp_path: Path) -> None:
    hub = Hub(2)
    with connected(hub=hub, recorder_size=8) as (a, b):
        a.isend_object("x", 1)
        b.recv_object(0)
        hub.kill(1)
        for _ in range(20):
            with pytest.raises(CommError):
                a.send_object("y", 1)
        assert read(a.dump(tmp_path)).open == ()


def test_a_failure_is_dumped_and_close_dumps_again(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    with connected(trace_dir=str(folder), name="flights") as (a, b):
        handle = b.irecv_tensor_dict(0)
        a.isend_object("not a dict", 1)
        with pytest.raises(CommError, match="the peer sent an object"):
            handle.wait(20)
        path = wait_for(folder, "*rank1.json")
        dump = read(path)
        assert dump.reason == "an operation failed (protocol)"
        assert [r.error for r in dump.records if r.error] == ["protocol"]
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 2
    assert {read(folder / name).reason for name in names} == {"closed"}


def wait_for(folder: Path, pattern: str) -> Path:
    pause = threading.Event()
    for _ in range(2000):
        for path in folder.glob(pattern):
            return path
        pause.wait(0.01)
    raise AssertionError(f"no {pattern} in {folder}")


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with connected(trace_dir=str(tmp_path / "file" / "x")) as (a, _):
        with pytest.raises(CommError, match="dump to") as caught:
            a.dump()
        assert caught.value.kind is ErrorKind.CONFIG
    assert "no dump in" in caplog.text


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"schema": 1}', b"\xff\xfe", b"null"])
def test_files_that_are_no_dumps_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(CommError, match="no dump") as caught:
        read(path)
    assert caught.value.kind is ErrorKind.CONFIG


def test_another_schema_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"schema": 99, "new": true}')
    with pytest.raises(CommError, match="schema 99"):
        read(path)


def test_a_sink_that_fails_is_logged_and_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a sink")

    monkeypatch.setattr(recorder.Recorder, "finished", fails)
    monkeypatch.setattr(recorder.Recorder, "waited", fails)
    with connected(recorder_size=8) as comms:
        exchange(*comms)
        assert read(comms[0].dump(tmp_path)).open == ()
    assert "ZeroDivisionError: a sink" in caplog.text


# Reports on demand


@each_transport
def test_a_report_while_nothing_is_stuck(semantics: Semantics) -> None:
    with connected(3, semantics) as comms:
        handle = comms[0].irecv_object(1)
        report = comms[0].report()
        assert report.silent == ()
        assert [state.rank for state in report.states] == [0, 1, 2]
        assert report.findings == report.cycles == ()
        assert report.case is None
        assert "nothing has waited for 1 s" in str(report)
        assert "irecv_object from rank 1" in str(report)
        assert comms[0].last_report is None
        comms[1].send_object("x", 0)
        assert handle.result(20) == "x"


def test_reports_while_messages_flow() -> None:
    with connected(2) as (a, b):
        done = threading.Event()

        def traffic() -> None:
            while not done.is_set():
                a.isend_object("x", 1)
                assert b.recv_object(0) == "x"

        thread = threading.Thread(target=traffic)
        thread.start()
        try:
            for _ in range(30):
                for comm in (a, b):
                    report = comm.report()
                    assert report.silent == report.findings == ()
        finally:
            done.set()
            thread.join(20)


@pytest.fixture
def late_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends are seen complete 50 ms after they are received, as on a machine that is busy."""
    isend, wait = LocalEndpoint.isend, LocalEndpoint.wait
    sends: weakref.WeakSet[Work] = weakref.WeakSet()

    def isend_noted(self: LocalEndpoint, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        work = isend(self, tensor, dst, tag)
        sends.add(work)
        return work

    def wait_late(self: LocalEndpoint, work: Work) -> None:
        wait(self, work)
        if work in sends:
            time.sleep(0.05)

    monkeypatch.setattr(LocalEndpoint, "isend", isend_noted)
    monkeypatch.setattr(LocalEndpoint, "wait", wait_late)


@pytest.mark.usefixtures("late_sends")
def test_every_report_is_answered_while_sends_are_seen_complete_late() -> None:
    with connected(2) as comms:
        for _ in range(12):
            for comm in comms:
                assert comm.report().silent == ()


@pytest.mark.usefixtures("late_sends")
def test_every_report_of_many_threads_is_answered() -> None:
    with connected(3) as comms, ThreadPoolExecutor(40) as pool:
        reports = [pool.submit(comms[number % 2].report, 20) for number in range(40)]
        assert all(report.result(30).silent == () for report in reports)


def test_a_rank_that_makes_no_calls_is_silent_where_progress_needs_calls() -> None:
    with connected(2, FUNNELED, close_timeout=0.2) as (a, _):
        report = a.report(timeout=0.05)
        assert report.silent == (1,)
        assert "no answer from rank 1" in str(report)


def test_a_report_of_a_closed_communicator_is_its_own() -> None:
    with connected(2) as (a, b):
        closing = threading.Thread(target=b.close)
        closing.start()
        a.close()
        closing.join(20)
        report = a.report()
        assert report.silent == (1,)
        assert [state.rank for state in report.states] == [0]


def test_a_group_of_one() -> None:
    with connected(1) as (comm,):
        assert comm.report().silent == ()


# Hostile peers


def state(**changes: Any) -> RankState:
    empty = RankState(1, "host", 1, (), (), 0, (), 0, ())
    return msgspec.structs.replace(empty, **changes)


def left() -> None:
    pass


def test_an_answer_for_another_rank_is_not_believed() -> None:
    with connected(3, close_timeout=0.5) as comms:
        handle = comms[0].irecv_object(1)
        comms[1]._connection.send_inquiry(0, Answer(0, state(rank=2)), left)
        with pytest.raises(CommError, match="speaks for another rank"):
            handle.wait(20)
        comms[2].isend_object("fine", 0)
        assert comms[0].recv_object(2) == "fine"


def test_an_answer_that_nobody_asked_for_is_dropped() -> None:
    with connected(2) as (a, b):
        for number in range(100):
            b._connection.send_inquiry(0, Answer(number, state()), left)
        assert a.report().silent == ()


def test_a_flood_of_questions_is_answered_and_not_queued() -> None:
    with connected(2) as (a, b):
        for number in range(500):
            b._connection.send_inquiry(0, Ask(number, True), left)
        assert b.report().silent == ()
        assert a.ledger.snapshot().operations == ()


OPERATION = PendingOperation("isend", "data", "0", 0, "send", 0, -1, 0, 1.0, False, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"operations": (OPERATION,) * (MAX_OPERATIONS + 1)},
        {"host": "x" * 129},
        {"pid": -1},
        {"operations": (msgspec.structs.replace(OPERATION, site="x" * 513),)},
        {"operations": (msgspec.structs.replace(OPERATION, direction="up"),)},
        {"steps": (("data", 1),) * 4097},
    ],
    ids=["operations", "name", "negative", "site", "direction", "channels"],
)
def test_answers_beyond_the_limits_do_not_decode(changes: dict[str, Any]) -> None:
    assert decode_control(encode_control(Answer(0, state())), "test") == Answer(0, state())
    with pytest.raises(CommError) as caught:
        decode_control(encode_control(Answer(0, state(**changes))), "test")
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert decode_control(encode_control(Bye((), ())), "test") == Bye((), ())


# The monitor


def test_every_pending_handle_raises_when_the_monitor_dies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connected(3, stall_timeout=60.0, close_timeout=0.5) as comms:
        handles = [comms[0].irecv_object(1), comms[0].isend(torch.ones(LARGE), 2)]
        observation = comms[0]._session.observation

        def dies(*_: Any) -> str:
            raise MemoryError("no more")

        observation._watch.due = dies  # type: ignore[union-attr, method-assign]
        observation._wake()
        for handle in handles:
            with pytest.raises(CommError, match="MemoryError: no more") as caught:
                handle.wait(20)
            assert caught.value.kind is ErrorKind.PROTOCOL
        with pytest.raises(CommError, match="MemoryError"):
            comms[0].isend_object("x", 1)
        comms[1].isend_object("fine", 2)
        assert comms[2].recv_object(1) == "fine"
    assert "the monitor died" in caplog.text


def test_reports_of_one_stall_become_rarer() -> None:
    def at(age: float, number: int = 0) -> RankState:
        return state(operations=(msgspec.structs.replace(OPERATION, age=age, number=number),))

    watch = StallWatch(10.0)
    assert not watch.due(at(9.9))
    assert "10.1 s (stall_timeout = 10 s)" in watch.due(at(10.1))
    assert not watch.due(at(19.0))
    assert watch.due(at(20.5))
    assert not watch.due(at(40.0))
    assert watch.due(at(11.0, number=1)), "another operation is stuck now"
    assert not watch.due(state())


@pytest.mark.parametrize("name", ["SIGNONE", "SIGKILL", "10"])
def test_a_signal_that_cannot_be_handled_is_refused(name: str) -> None:
    with pytest.raises(CommError, match="report_signal") as caught:
        connect_rank(Hub(1), 0, report_signal=name)
    assert caught.value.kind is ErrorKind.CONFIG


# Events


class Listener:
    def __init__(self) -> None:
        self.events: list[Any] = []

    @hookimpl
    def commlayer_event(self, event: Any) -> None:
        self.events.append(event)
        raise RuntimeError("a listener that fails")


@pytest.fixture
def listener() -> tuple[Listener, Registry]:
    registry = Registry(entry_points=[])
    listener = Listener()
    registry.register(listener)
    return listener, registry


def test_plugins_are_told_of_operations(
    listener: tuple[Listener, Registry], caplog: pytest.LogCaptureFixture
) -> None:
    told, registry = listener
    with connected(2, registry=registry, stall_timeout=0) as (a, b):
        a.isend_object("x", 1)
        assert b.recv_object(0) == "x"
        a.drain(20)
    moments = {
        rank: [e.moment for e in told.events if isinstance(e, OperationEvent) and e.rank == rank]
        for rank in (0, 1)
    }
    assert moments[0] == ["posted", "settled", "released"]
    assert moments[1] == ["posted", "matched", "settled", "released"]
    last = told.events[-1]
    assert (last.channel, last.tag, last.error) == ("data", "objects", "")
    assert "a listener that fails" in caplog.text


def test_plugins_are_told_of_stalls(
    listener: tuple[Listener, Registry], caplog: pytest.LogCaptureFixture
) -> None:
    told, registry = listener
    pause = threading.Event()
    with connected(2, registry=registry, stall_timeout=0.05) as (a, b):
        handle = a.irecv_object(1)
        while not any(isinstance(event, StallEvent) for event in told.events):
            pause.wait(0.01)
        b.send_object("x", 0)
        handle.wait(20)
    (record, *_) = [r for r in caplog.records if "commlayer report" in r.getMessage()]
    assert record.levelno == logging.WARNING


def test_the_format_of_dumps_is_that_of_its_version() -> None:
    """Change `SCHEMA` when a field is renamed or means something else."""
    assert recorder.SCHEMA == 1
    assert Dump.__struct_fields__ == (
        "schema", "who", "reason", "clocks", "forgotten", "records", "open", "blocked", "report",
    )  # fmt: skip
    assert Record.__struct_fields__ == (
        "kind", "channel", "tag", "peer", "direction", "sequence", "nbytes", "posted", "matched",
        "settled", "released", "step", "error", "site",
    )  # fmt: skip
