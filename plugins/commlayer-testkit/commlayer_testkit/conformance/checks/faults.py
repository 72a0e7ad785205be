"""L4: stress, and peers that stop or die."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.conformance.checks.tools import (
    LARGE,
    LIMIT,
    SMALL,
    connected,
    digest,
    pattern,
    until,
)
from commlayer_testkit.conformance.gates import ANY_THREAD
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.expecting import expect_error, expires

VICTIM = 1


def beside_a_silent_peer(subject: Subject) -> list[str]:
    comm = connected(subject)
    found = []
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
        comm.isend(pattern(VICTIM), 0)
        found.append(digest(comm.recv(None, 0)))
    elif comm.rank == 0:
        here.hear()
        receive = comm.irecv(None, VICTIM)
        send = comm.isend(pattern(0), VICTIM)
        for handle in (receive, send):
            for _ in range(2):
                assert expires(handle.synchronize), "complete, and the peer is stopped"
        comm.isend(pattern(0, 2), 2)
        found.append(digest(comm.recv(None, 2)))
        here.say("timed out")
        found.append(digest(receive.result(LIMIT)))
        send.wait(LIMIT)
    else:
        comm.isend(pattern(2, 0), 0)
        found.append(digest(comm.recv(None, 0)))
    comm.close(LIMIT)
    return found


@rule(Level.L4, "silent-peer")
def silent_peer(lab: Lab) -> None:
    """One of three ranks is stopped (SIGSTOP), others exchange, it resumes."""
    processes = lab.spawn(beside_a_silent_peer, 3)
    first, victim, _ = processes
    victim.hear()
    victim.stop()
    first.say("the peer is stopped")
    first.hear()
    victim.resume()
    victim.say("go on")
    found = lab.collect(processes)
    assert [process.wait(LIMIT) for process in processes] == [0, 0, 0]
    assert found[0] == [digest(pattern(2, 0)), digest(pattern(VICTIM))]
    assert found[1] == [digest(pattern(0))]
    assert found[2] == [digest(pattern(0, 2))]


def beside_a_dead_peer(subject: Subject) -> list[str]:
    comm = connected(subject, peer_timeout=0.0)
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
    found: list[str] = []
    if comm.rank == 0:
        pending = [comm.irecv(None, VICTIM), comm.isend(pattern(1), VICTIM)]
        here.say("posted")
        here.hear()
        for handle in pending:
            error = expect_error(ErrorKind.PEER_LOST, partial(handle.wait, LIMIT))
            assert f"rank {VICTIM}" in str(error), f"rank {VICTIM} is not named: {error}"
        expect_error(ErrorKind.PEER_LOST, lambda: comm.isend(pattern(1), VICTIM))
    if comm.rank != VICTIM:
        other = 2 - comm.rank
        comm.isend(pattern(comm.rank), other)
        found.append(digest(comm.recv(None, other)))
        here.meet("exchanged", 2)
    try:
        comm.close(5.0)
    except CommError as error:
        if error.kind not in (ErrorKind.PEER_LOST, ErrorKind.TIMEOUT):
            raise
    return found


@rule(Level.L4, "dead-peer")
def dead_peer(lab: Lab) -> None:
    """One of three ranks is killed while a send and a receive with it are pending.

    Not applicable where a launcher of the backend's own ends the job with any rank.
    """
    lab.kills_a_rank()
    first, victim, third = lab.spawn(beside_a_dead_peer, 3)
    victim.hear()
    first.hear()
    victim.signal(signal.SIGKILL)
    victim.wait()
    first.say("go on")
    found = lab.collect([first, third])
    assert found == [[digest(pattern(2))], [digest(pattern(0))]], "the living got other bytes"


def closes_beside_the_dead(subject: Subject) -> float:
    comm = connected(subject)
    if comm.rank == VICTIM:
        here.say("ready")
        here.hear()
    comm.irecv(None, VICTIM)
    comm.isend(pattern(1, elements=LARGE * 16), VICTIM)
    here.say("posted")
    here.hear()
    began = time.monotonic()
    try:
        comm.close(2.0)
    except CommError:
        pass
    return time.monotonic() - began


@rule(Level.L4, "close-dead-peer")
def close_dead_peer(lab: Lab) -> None:
    """A rank closes, with a limit of 2 s, after its peer was killed; then it exits with 0.

    Not applicable where a launcher of the backend's own ends the job with any rank.
    """
    lab.kills_a_rank()
    first, victim = lab.spawn(closes_beside_the_dead, 2)
    victim.hear()
    first.hear()
    victim.signal(signal.SIGKILL)
    victim.wait()
    first.say("close")
    seconds = first.result(LIMIT)
    lab.evidence["seconds_to_close"] = round(seconds, 2)
    assert first.wait(LIMIT) == 0, first.output


def churning(subject: Subject, rounds: int, lanes: int) -> list[str]:
    comm = connected(subject, max_inflight_ops=32)
    peer = 1 - comm.rank
    found: dict[int, str] = {}
    failures: list[BaseException] = []
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            gc.collect()
            for _ in range(8):
                torch.full((LARGE,), 0xAB, dtype=torch.uint8)

    def talk(tag: int) -> None:
        try:
            received = []
            for step in range(rounds):
                elements = (SMALL, 0, LARGE, 5000)[(step + tag) % 4]
                comm.isend(pattern(comm.rank, tag, step, elements=elements), peer, tag)
                received.append(comm.recv(None, peer, tag))
            found[tag] = digest(*received)
        except BaseException as error:
            failures.append(error)

    threads: list[threading.Thread] = [threading.Thread(target=disturb)]
    threads += [threading.Thread(target=talk, args=(tag,)) for tag in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    if failures:
        raise failures[0]
    until(lambda: not comm.ledger.snapshot().operations)
    comm.close(LIMIT)
    return [found[tag] for tag in range(lanes)]


@rule(Level.L4, "churn", ANY_THREAD)
def churn(lab: Lab) -> None:
    """Four threads exchange 40 messages each, every handle dropped, beside a churning thread."""
    rounds, lanes = 40, 4
    found = lab.run(churning, 2, rounds, lanes, limit=90)
    for rank in range(2):
        for tag in range(lanes):
            sizes = [(SMALL, 0, LARGE, 5000)[(step + tag) % 4] for step in range(rounds)]
            sent = [pattern(1 - rank, tag, n, elements=size) for n, size in enumerate(sizes)]
            assert found[rank][tag] == digest(*sent), f"rank {rank} got other bytes on tag {tag}"


def resources() -> dict[str, int]:
    """Resident bytes, threads and file descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def grows(subject: Subject, messages: int) -> tuple[dict[str, int], dict[str, int]]:
    comm = connected(subject)
    peer = 1 - comm.rank
    measured: list[Any] = []
    for part in (messages // 4, messages):
        for step in range(part):
            comm.isend(torch.full((LARGE // 4,), step % 255, dtype=torch.uint8), peer)
            comm.recv(None, peer)
        comm.drain(LIMIT)
        gc.collect()
        measured.append(resources())
    comm.close(LIMIT)
    return measured[0], measured[1]


@rule(Level.L4, "no-growth")
def no_growth(lab: Lab) -> None:
    """Between message 250 and 1250, of 64 KiB: below 48 MiB, 8 threads and 8 descriptors more."""
    limits = {"bytes": 48 << 20, "threads": 8, "descriptors": 8}
    for rank, (before, after) in enumerate(lab.run(grows, 2, 1000, limit=90)):
        growth = {key: after[key] - before[key] for key in limits}
        lab.evidence[f"growth of rank {rank}"] = growth
        for key, limit in limits.items():
            assert growth[key] < limit, f"rank {rank} has {growth[key]} more {key}"
