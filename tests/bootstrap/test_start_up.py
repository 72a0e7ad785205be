"""What `connect` says when ranks, the store or the port are not as they should be."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from commlayer_gloo import GlooTransport
from commlayer_testkit.ports import LOOPBACK, free_port
from ranks import here
from ranks.pool import Process, Ranks, collect

import commlayer
from commlayer import CommError, CommTimeout, ErrorKind
from commlayer.bootstrap.stores import Address, open_store

LIMIT = 4.0
"""Seconds: long enough for ranks that are there, short enough to wait for those that are not."""
FOREVER = 3000.0


def environment(rank: int, size: int, port: int, **changed: str) -> dict[str, str]:
    """As of a launcher that leaves the store to rank 0."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **changed,
    }


def outcome(limit: float = LIMIT, **settings: Any) -> tuple[str, str]:
    """Kind and text of the error of `connect`; empty where it connects."""
    try:
        comm = commlayer.connect({"backend": "gloo", "connect_timeout": limit, **settings})
    except CommError as error:
        return error.kind.value, str(error)
    comm.close(20)
    return "", ""


def tell(limit: float = LIMIT, settings: Any = None) -> None:
    here.say(outcome(limit, **(settings or {})))


def start(
    ranks: Ranks, rank: int, size: int, port: int, *arguments: Any, **changed: str
) -> Process:
    environ = environment(rank, size, port, **changed)
    return ranks.spawn(tell, 1, *arguments, environment=environ, finalize=False)[0]


# -- what holds the port -----------------------------------------------------------


def says_nothing(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.recv(1)


def answers_otherwise(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def hangs_up(connection: socket.socket) -> None:
    pass


@contextmanager
def program(behaviour: Callable[[socket.socket], None]) -> Iterator[int]:
    """A program that listens at a port and behaves so."""
    listener = socket.create_server((LOOPBACK, 0), backlog=64)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(connection,), daemon=True).start()

    def talk(connection: socket.socket) -> None:
        with connection:
            try:
                behaviour(connection)
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@pytest.mark.parametrize("behaviour", [says_nothing, answers_otherwise, hangs_up])
def test_another_program_at_the_address_is_named(
    ranks: Ranks, behaviour: Callable[[socket.socket], None]
) -> None:
    with program(behaviour) as port:
        first, second = (start(ranks, rank, 2, port) for rank in (0, 1))
        kind, text = first.hear(60)
        assert kind == ErrorKind.CONFIG.value
        assert f"rank 0 cannot serve the store at port {port}: another program has the port" in text
        assert "MASTER_PORT" in text
        kind, text = second.hear(60)
        assert kind in (ErrorKind.CONFIG.value, ErrorKind.TIMEOUT.value)
        assert f"the store at {LOOPBACK}:{port} cannot be used" in text
        assert "program" in text
        assert "MASTER_PORT" in text


def test_another_store_at_the_address_is_named(ranks: Ranks) -> None:
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    kind, text = start(ranks, 0, 2, store.port).hear(60)
    assert kind == ErrorKind.CONFIG.value
    assert "a store of another job has the port" in text


def test_a_rank_0_that_does_not_come_is_named(ranks: Ranks) -> None:
    port = free_port()
    kind, text = start(ranks, 1, 2, port).hear(60)
    assert kind == ErrorKind.TIMEOUT.value
    assert f"the store at {LOOPBACK}:{port} cannot be used: rank 0 did not connect" in text


def test_a_name_that_is_not_resolved_is_named(ranks: Ranks) -> None:
    kind, text = start(ranks, 1, 2, free_port(), MASTER_ADDR="no-such-host.invalid").hear(90)
    assert kind == ErrorKind.TIMEOUT.value
    assert "the name 'no-such-host.invalid' is not resolved" in text
    assert "MASTER_ADDR" in text


def test_a_store_of_the_launcher_that_is_not_where_the_environment_says(ranks: Ranks) -> None:
    """An own MASTER_PORT under torchrun, which has every rank think that torchrun serves it."""
    port = free_port()
    for process in [
        start(ranks, rank, 2, port, TORCHELASTIC_USE_AGENT_STORE="True") for rank in (0, 1)
    ]:
        _, text = process.hear(60)
        assert "torchrun serves the store itself (TORCHELASTIC_USE_AGENT_STORE = True)" in text
        assert "Start rank 0" not in text


# -- who comes ---------------------------------------------------------------------


def test_absent_ranks_are_named_on_every_rank_that_came(ranks: Ranks) -> None:
    port = free_port()
    for process in [start(ranks, rank, 4, port) for rank in (0, 2)]:
        kind, text = process.hear(60)
        assert kind == ErrorKind.TIMEOUT.value
        assert "rank 1, 3 of 4 did not connect" in text or "had given up" in text


def test_a_second_process_of_a_rank_is_named_on_every_rank(ranks: Ranks) -> None:
    """While rank 2 is awaited, so that both are there at the same time."""
    port = free_port()
    processes = [start(ranks, rank, 3, port, 60.0) for rank in (0, 1, 1)]
    pids = [process.pid for process in processes]
    for process in processes:
        kind, text = process.hear(90)
        assert kind == ErrorKind.CONFIG.value
        assert "two processes connect as rank 1" in text
        assert f"pid {pids[1]} on" in text
        assert f"pid {pids[2]} on" in text


def test_a_second_rank_0_is_told_who_is_the_first(ranks: Ranks) -> None:
    port = free_port()
    first = start(ranks, 0, 2, port, 60.0)
    with served(port):
        kind, text = start(ranks, 0, 2, port).hear(60)
    assert kind == ErrorKind.CONFIG.value
    assert f"rank 0 of another job, or a second one of this (pid {first.pid} on " in text


@contextmanager
def served(port: int) -> Iterator[None]:
    """Wait until somebody serves at `port`."""
    while True:
        try:
            socket.create_connection((LOOPBACK, port), 1).close()
            break
        except OSError:
            threading.Event().wait(0.02)
    yield


def test_a_world_of_another_size_is_named_on_every_rank(ranks: Ranks) -> None:
    port = free_port()
    for process in [start(ranks, rank, size, port) for rank, size in ((0, 2), (1, 3))]:
        _, text = process.hear(60)
        assert "WORLD_SIZE 3 and 2" in text


def holds(name: str) -> None:
    comm = commlayer.connect({"backend": "gloo", "connect_timeout": 60.0})
    here.say("connected")
    here.hear()
    comm.close()


def test_another_job_at_the_port_disturbs_nobody_that_has_connected(ranks: Ranks) -> None:
    """The other job is told who is there; the first goes on."""
    port = free_port()
    job = [
        ranks.spawn(holds, 1, "", environment=environment(rank, 2, port), finalize=False)[0]
        for rank in (0, 1)
    ]
    assert [each.hear(60) for each in job] == ["connected"] * 2
    kind, text = start(ranks, 0, 2, port, 20.0).hear(60)
    assert kind == ErrorKind.CONFIG.value
    assert f"(pid {job[0].pid} on" in text
    kind, text = start(ranks, 1, 2, port).hear(60)
    assert kind == ErrorKind.TIMEOUT.value
    assert f"another process (pid {job[1].pid} on" in text
    for each in job:
        each.say("leave")
    collect(job)


# -- what a rank fails of is told to the others ------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_one_rank_fails_of_is_told_by_the_others(ranks: Ranks, failing: int) -> None:
    """An address of another host, which is found out before the ranks meet."""
    bad = {"bind_address": "203.0.113.1"}
    processes = [
        ranks.spawn(tell_late, 1, rank == failing, bad, environment=shared, finalize=False)[0]
        for rank, shared in enumerate(shared_environment(ranks, 3))
    ]
    for rank, process in enumerate(processes):
        if rank != failing:
            assert process.hear(60) == "about to connect"
    processes[failing].say("go on")
    for rank, process in enumerate(processes):
        kind, text = process.hear(90)
        # A rank that answers only after rank 0 has left finds it out at its own limit.
        assert kind in (ErrorKind.CONFIG.value, ErrorKind.TIMEOUT.value)
        assert "cannot listen at '203.0.113.1'" in text
        if rank != failing:
            assert f"rank {failing} (pid {processes[failing].pid} on" in text


def shared_environment(ranks: Ranks, size: int) -> list[dict[str, str]]:
    """With a store that outlives every rank."""
    ranks.spawn(os.getpid, 1)[0].result()
    port = ranks._stores[0].port
    return [
        environment(rank, size, port, TORCHELASTIC_USE_AGENT_STORE="True") for rank in range(size)
    ]


def tell_late(late: bool, settings: Any) -> None:
    if late:
        here.hear()
        here.say(outcome(30.0, **settings))
        return
    here.say("about to connect")
    here.say(outcome(10.0))


def dies_in_transport() -> None:
    """Rank 1 is killed once all have met; the others have limits that nobody waits for."""
    if here.rank() == 1:
        GlooTransport.endpoint = lambda self, name: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]
    here.say(outcome(FOREVER if here.rank() == 1 else 8.0))


def test_a_rank_that_dies_after_all_have_met_ends_the_start_up_of_the_others(ranks: Ranks) -> None:
    first, victim, third = ranks.spawn(dies_in_transport, 3, finalize=False)
    assert victim.wait() == -signal.SIGKILL
    for process in (first, third):
        kind, _ = process.hear(60)
        assert kind in (ErrorKind.TIMEOUT.value, ErrorKind.PEER_LOST.value)


def raises_in_transport() -> None:
    if here.rank() == 1:

        def endpoint(self: Any, name: str) -> Any:
            raise RuntimeError("the network is on fire")

        GlooTransport.endpoint = endpoint  # type: ignore[method-assign]
    here.say(outcome(FOREVER))


def test_what_a_transport_raises_is_told_by_every_rank(ranks: Ranks) -> None:
    """Long before the limit of gloo's own."""
    processes = ranks.spawn(raises_in_transport, 3, finalize=False)
    for process in processes:
        _, text = process.hear(60)
        assert "RuntimeError: the network is on fire" in text
    texts = [process.rank for process in processes]
    assert texts == [0, 1, 2]


def few_descriptors(spare: int) -> None:
    held = len(os.listdir("/proc/self/fd"))
    if here.rank() == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (held + spare, held + 1000))
    said = outcome(5.0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + 1000, held + 1000))
    here.say(said)


@pytest.mark.parametrize("spare", [0, 1, 3, 6, 10, 14, 30])
def test_too_few_descriptors_are_named(ranks: Ranks, spare: int) -> None:
    """On the rank that has too few, wherever it runs out, and by the others."""
    first, second = ranks.spawn(few_descriptors, 2, spare, finalize=False)
    said = [process.hear(90) for process in (first, second)]
    if said == [("", "")] * 2:
        assert spare > 4
        return
    assert "too few file descriptors" in said[1][1], said
    assert "ulimit -n" in said[1][1]
    assert said[0][0], "rank 0 connected alone"


# -- signals -----------------------------------------------------------------------


def exits(number: int, frame: Any) -> None:
    raise SystemExit(3)


def interrupted(phase: str) -> None:
    """Connect with a limit that nobody waits for; how it was interrupted is told."""
    signal.signal(signal.SIGTERM, exits)
    if phase == "transport" and here.rank() == 1:

        def endpoint(self: Any, name: str) -> Any:
            here.say("waiting")
            here.hear()

        GlooTransport.endpoint = endpoint  # type: ignore[method-assign]
    if phase != "transport" or here.rank() == 0:
        here.say("waiting")
    try:
        commlayer.connect({"backend": "gloo", "connect_timeout": FOREVER})
    except KeyboardInterrupt:
        here.say("interrupted")
    except SystemExit as error:
        here.say(f"exit {error.code}")
    except CommError as error:
        here.say(str(error))


PHASES = ("name", "nobody", "silent", "rank 0", "roster", "stopped store", "transport")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("phase", PHASES)
def test_signals_are_answered_in_every_phase(
    ranks: Ranks, phase: str, number: signal.Signals
) -> None:
    """None would be before the limit, which is far beyond that of this test."""
    expected = "interrupted" if number == signal.SIGINT else "exit 3"

    def spawn(rank: int, size: int, port: int, **changed: str) -> Process:
        environ = environment(rank, size, port, **changed)
        (process,) = ranks.spawn(interrupted, 1, phase, environment=environ, finalize=False)
        return process

    port = free_port()
    others: list[Process] = []
    with program(says_nothing) as silent:
        if phase == "name":
            victim = spawn(1, 2, port, MASTER_ADDR="no-such-host.invalid")
        elif phase == "nobody":
            victim = spawn(1, 2, port)
        elif phase == "silent":
            victim = spawn(1, 2, silent)
        elif phase == "rank 0":
            victim = spawn(0, 2, port)
        elif phase == "transport":
            victim, *others = ranks.spawn(interrupted, 2, phase, finalize=False)
        else:
            others = [spawn(0, 3, port)]
            assert others[0].hear() == "waiting"
            victim = spawn(1, 3, port)
        for each in (victim, *others):
            if not (phase in ("roster", "stopped store") and each in others):
                assert each.hear() == "waiting"
        settle(phase, victim, others)
        victim.signal(number)
        assert victim.hear(60) == expected
        victim.result(60)
        for each in others:
            each.resume()


def settle(phase: str, victim: Process, others: list[Process]) -> None:
    """Let the victim get into its phase; a signal that is early is answered as well."""
    threading.Event().wait(0.5)
    if phase == "stopped store":
        others[0].stop()
        threading.Event().wait(0.3)
    victim.sleeping()


# -- whatever it is, a CommError -----------------------------------------------------


class Bomb:
    """A policy that raises."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError("no such thing")


def test_what_a_policy_raises_becomes_a_comm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(CommError, match="LookupError: no such thing") as caught:
        commlayer.connect({"backend": "gloo"}, retention=Bomb())  # type: ignore[arg-type]
    assert caught.value.kind is ErrorKind.CONFIG
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_store_has_the_time_that_connect_has_and_its_clones_too() -> None:
    store = open_store(Address(LOOPBACK, free_port()), serve=True, limit=45.0)
    assert store.timeout == timedelta(seconds=45)
    assert store.clone().timeout == timedelta(seconds=45)


def test_a_timeout_is_a_timeout_error(ranks: Ranks) -> None:
    assert issubclass(CommTimeout, TimeoutError)
