"""Disagreements, silent peers and cycles on real processes: every rank reports what matters."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommTimeout, Communicator
from commlayer.observe.report import Case, Report

LIMIT = 0.4
LARGE = 1 << 18


def connect() -> tuple[Communicator, Callable[[], Report]]:
    """A communicator that reports soon, and what waits for its first report."""
    came = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "commlayer report" in record.getMessage() and record.levelno == logging.WARNING:
                came.set()

    logging.getLogger("commlayer").addHandler(Handler())
    comm = here.connect(stall_timeout=LIMIT, record_sites=True)

    def reported() -> Report:
        assert came.wait(60)
        assert comm.last_report is not None
        return comm.last_report

    return comm, reported


def end() -> None:
    """Leave without what is stuck."""
    here.meet("reported")
    os._exit(0)


def line_of(text: str) -> str:
    """``file:line`` of the only line of this file that contains `text`."""
    with open(__file__) as file:
        (number,) = [n for n, line in enumerate(file, 1) if text in line and "line_of" not in line]
    return f"{__file__}:{number}"


def in_background(function: Callable[[], object]) -> None:
    threading.Thread(target=function, daemon=True).start()


def both_receive() -> None:
    comm, reported = connect()
    in_background(lambda: comm.recv_object(1 - comm.rank))
    here.say(reported())
    end()


def reports_of(ranks: Ranks, function: Callable[..., None], size: int = 2) -> list[Report]:
    processes = ranks.spawn(function, size)
    return [process.hear() for process in processes]


def test_two_ranks_that_both_receive_are_a_cycle(ranks: Ranks) -> None:
    for rank, report in enumerate(reports_of(ranks, both_receive)):
        assert report.rank == rank
        assert report.case is Case.CYCLE
        assert report.cycles == ((0, 1),)
        text = str(report)
        assert "ranks 0 and 1 wait for each other" in text
        site = line_of("in_background(lambda: comm.recv_object(1")
        for mine, peer in ((0, 1), (1, 0)):
            wait = next(w for w in report.waits if w.rank == mine)
            assert wait.peer == peer
            assert wait.missing == "post"
            assert wait.operation.age >= LIMIT / 2
            assert f"rank {mine} has waited {wait.operation.age:.1f} s for irecv_object" in text
        assert text.count(f"posted at {site}") >= 2


def three_send_first() -> None:
    comm, reported = connect()
    after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3

    def body() -> None:
        comm.send(torch.ones(LARGE), after)
        comm.recv(None, before)

    in_background(body)
    here.say(reported())
    end()


def test_three_ranks_that_all_send_and_wait_are_a_cycle(ranks: Ranks) -> None:
    for report in reports_of(ranks, three_send_first, 3):
        assert report.case is Case.CYCLE
        assert report.cycles == ((0, 1, 2),)
        assert {w.operation.kind for w in report.waits} == {"isend"}
        assert all(w.operation.nbytes >= 4 * LARGE for w in report.waits)


def one_skips_a_broadcast(waiting: int, large: bool, circle: bool) -> None:
    comm, reported = connect()
    for step in range(3):
        comm.broadcast_object(step, 0)

    def body() -> None:
        if comm.rank == waiting:
            comm.broadcast(torch.ones(LARGE if large else 1), 0)
        if circle:
            comm.recv_object(1 - comm.rank)

    in_background(body)
    here.say(reported())
    end()


@pytest.mark.parametrize("circle", [False, True], ids=["open", "circle"])
@pytest.mark.parametrize("large", [False, True], ids=["inline", "large"])
@pytest.mark.parametrize("waiting", [0, 1], ids=["sent", "received"])
def test_a_broadcast_that_one_rank_skips(
    ranks: Ranks, waiting: int, large: bool, circle: bool
) -> None:
    """Rank `waiting` is one broadcast ahead, as the source or as a receiver.

    Where both then wait for each other, the other rank may be about to call it, so
    that the circle comes first.
    """
    processes = ranks.spawn(one_skips_a_broadcast, 2, waiting, large, circle)
    for report in [process.hear() for process in processes]:
        first = [Case.CYCLE, Case.BROADCAST_MISMATCH] if circle else [Case.BROADCAST_MISMATCH]
        assert [finding.case for finding in report.findings][: len(first)] == first
        mismatch = report.findings[len(first) - 1]
        assert set(mismatch.ranks) == {0, 1}
        counts = [3, 3]
        counts[waiting] += 1
        text = str(report)
        assert f"rank 0 has called {counts[0]}, rank 1 has called {counts[1]}" in text
        details = " ".join(mismatch.details)
        if waiting == 1 or large:
            assert f"rank {waiting} has waited" in details
            assert "broadcast 3 of the channel" in details
        else:
            assert "rank 1 has not asked for 1 message of rank 0 (channel broadcast" in details


def different_sources() -> None:
    comm, reported = connect()
    in_background(lambda: comm.broadcast_object(None, 1 - comm.rank))
    here.say(reported())
    end()


def test_ranks_that_name_different_sources(ranks: Ranks) -> None:
    for report in reports_of(ranks, different_sources):
        assert report.case is Case.BROADCAST_SOURCE
        assert "name different sources for broadcast 0" in str(report)


def all_are_the_source() -> None:
    comm, reported = connect()
    in_background(lambda: comm.broadcast(torch.ones(LARGE), comm.rank))
    here.say(reported())
    end()


def test_ranks_that_all_think_they_are_the_source(ranks: Ranks) -> None:
    for report in reports_of(ranks, all_are_the_source, 3):
        assert cases(report) == {Case.BROADCAST_SOURCE, Case.CYCLE}
        assert report.case is Case.BROADCAST_SOURCE
        text = report.findings[0].text
        assert re.fullmatch(r"ranks \d and \d name different sources for broadcast 0", text)


def one_of_three_differs() -> None:
    comm, reported = connect()
    in_background(lambda: comm.broadcast_object(None, 2 if comm.rank == 1 else 0))
    here.say(reported())
    end()


def test_one_rank_of_three_names_another_source(ranks: Ranks) -> None:
    """The rank that it names has taken part in that broadcast, and gone on."""
    for report in reports_of(ranks, one_of_three_differs, 3):
        assert cases(report) == {Case.BROADCAST_SOURCE}
        assert all(1 in finding.ranks for finding in report.findings)


def different_calls() -> None:
    comm, reported = connect()
    if comm.rank == 0:
        comm.isend_object("greeting", 1)
    in_background(lambda: comm.recv(None, 1 - comm.rank))
    here.say(reported())
    end()


def test_a_message_that_waits_on_another_lane(ranks: Ranks) -> None:
    for report in reports_of(ranks, different_calls):
        assert report.case is Case.WRONG_LANE
        details = " ".join(report.findings[0].details)
        assert re.search(r"rank 1 .* irecv from rank 0 \(channel data, tag 0,", details)
        assert re.search(r"rank 0 .* isend_object to rank 1 \(channel data, tag objects", details)


def a_foreign_barrier() -> None:
    dist.init_process_group("gloo", store=here.store(), rank=here.rank(), world_size=2)
    comm, reported = connect()
    if comm.rank == 0:
        in_background(lambda: dist.barrier())
    else:
        in_background(lambda: comm.recv_object(0))
    here.say(reported())
    end()


def test_a_call_of_torch_distributed_that_holds_a_rank_up(ranks: Ranks) -> None:
    for report in reports_of(ranks, a_foreign_barrier):
        assert report.case is Case.FOREIGN_CALL
        site = line_of("in_background(lambda: dist.barrier())")
        assert f"barrier() at {site}" in report.findings[0].text
        assert "rank 1 has waited" in report.findings[0].details[0]


def a_stopped_peer() -> None:
    comm, reported = connect()
    if comm.rank == 1:
        here.say("ready")
        here.hear()
        comm.send_object("late", 0)
        here.hear()
    else:
        here.hear()
        handle = comm.irecv_object(1)
        in_background(lambda: handle.wait())
        here.say(reported())
        assert handle.result(20) == "late"
        here.say("received")
        here.hear()
    comm.close()


def test_a_peer_that_stops_is_named_and_goes_on(ranks: Ranks) -> None:
    """A peer that has stopped without dying."""
    processes = ranks.spawn(a_stopped_peer, 2)
    assert processes[1].hear() == "ready"
    processes[1].stop()
    processes[0].say("stopped")
    report = processes[0].hear()
    assert report.case is Case.PEER_SILENT
    assert report.silent == (1,)
    text = str(report)
    assert "rank 1 does not answer" in text
    assert "rank 0 has waited" in text
    assert "no answer from rank 1" in text
    processes[1].resume()
    processes[1].say("go on")
    assert processes[0].hear() == "received"
    for process in processes:
        process.say("end")
    collect(processes)


def at_the_bound() -> None:
    pause = threading.Event()
    comm = here.connect(stall_timeout=LIMIT, max_inflight_ops=1)
    if comm.rank == 0:

        def body() -> None:
            comm.isend(torch.ones(LARGE), 1)
            comm.isend(torch.ones(LARGE), 1)

        in_background(body)
        report = comm.report()
        while cases(report) != {Case.BOUND_REACHED, Case.NEVER_RECEIVED}:
            pause.wait(0.1)
            report = comm.report()
        here.say(str(report))
    end()


def cases(report: Report) -> set[Case]:
    return {finding.case for finding in report.findings}


def test_a_thread_at_the_bound(ranks: Ranks) -> None:
    text = ranks.spawn(at_the_bound, 2)[0].hear()
    assert "rank 1 has not asked for what rank 0 sends" in text
    assert "rank 0 waits for room under the bounds, in 1 thread" in text


def on_a_signal() -> None:
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    comm = here.connect(report_signal="SIGUSR2", stall_timeout=0)
    came = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            came.set()

    logging.getLogger("commlayer").addHandler(Handler())
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        assert came.wait(60)
        assert seen == [signal.SIGUSR2]
        report = comm.last_report
        assert report is not None
        assert "a signal asks for it" in str(report)
        assert "nothing has waited" in str(report)
    here.meet("signalled")
    comm.close()
    before = signal.getsignal(signal.SIGUSR2)
    assert callable(before)
    before(0, None)
    assert seen[-1] == 0


def test_a_signal_asks_for_a_report_and_reaches_the_handler_before(ranks: Ranks) -> None:
    ranks.run(on_a_signal, 2)


def an_idle_server() -> Report | None:
    comm = here.connect(
        stall_timeout=LIMIT, channels={"requests": {"may_idle": True}}, record_sites=True
    )
    requests = comm.channel("requests")
    if comm.rank == 0:
        here.meet("waited", 3)
        for rank in (1, 2):
            requests.send_object("stop", rank)
    else:
        receive = requests.irecv_object(0)
        with pytest.raises(CommTimeout):
            receive.wait(LIMIT * 6)
        report = comm.report()
        assert report.findings == ()
        assert "irecv_object from rank 0 (channel requests" in str(report), "it is listed"
        here.meet("waited", 3)
        assert receive.result(20) == "stop"
    here.meet("stopped", 3)
    comm.close()
    return comm.last_report


def test_a_server_that_waits_for_requests_is_no_stall(ranks: Ranks) -> None:
    assert ranks.run(an_idle_server, 3) == [None] * 3


def an_idle_engine() -> Report:
    comm, reported = connect()
    handle = comm.irecv_object(1 - comm.rank)
    report = reported()
    here.meet("reported")
    comm.send_object("work", 1 - comm.rank)
    assert handle.result(20) == "work"
    comm.close()
    return report


def test_receives_posted_ahead_that_nobody_waits_for(ranks: Ranks) -> None:
    for report in ranks.run(an_idle_engine, 2):
        assert cases(report) == {Case.IDLE}
        assert report.findings[0].text.endswith("and no thread waits for it")
