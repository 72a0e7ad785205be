"""What drives operations: which driver the facts allow, and that each one drives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from commlayer_testkit.local import (
    DEFAULTS,
    FUNNELED,
    SERIALIZED,
    WAITED,
    Hub,
    connect_rank,
    connected,
    eventually,
    on_every_rank,
)
from msgspec.structs import replace

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle
from commlayer.progress.choose import choose_progress
from commlayer.progress.deadline import Deadline
from commlayer.progress.direct import DirectProgress
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.polling import PollingProgress
from commlayer.progress.procedure import Procedure, Wait
from commlayer.progress.reaping import BackgroundReaping
from commlayer.progress.runtime import ThreadRuntime
from commlayer.progress.waiter import WaiterProgress
from commlayer.semantics import (
    OperationSemantics,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    Threads,
    WaitBlocks,
)

COMBINATIONS = [
    Semantics(
        p2p=OperationSemantics(poll=poll, wait_blocks=blocks, post_may_block=may_block),
        threads=threads,
        progress=progress,
    )
    for poll, blocks, may_block, threads, progress in product(
        Poll, WaitBlocks, PostMayBlock, Threads, Progress
    )
]


def waiters_are_sound(facts: Semantics) -> bool:
    return (
        facts.p2p.wait_blocks is WaitBlocks.HOST
        and facts.threads is Threads.MULTIPLE
        and facts.progress is Progress.AUTONOMOUS
    )


def polling_is_sound(facts: Semantics) -> bool:
    return facts.p2p.poll is Poll.EXACT and facts.p2p.post_may_block is PostMayBlock.NEVER


def choose(preference: str, facts: Semantics) -> Any:
    return choose_progress(preference, facts, ThreadRuntime(), "local")


def test_every_combination_of_facts_gets_a_sound_driver_or_a_refusal() -> None:
    outcomes = set()
    for facts in COMBINATIONS:
        if waiters_are_sound(facts):
            assert isinstance(choose("auto", facts), WaiterProgress)
            outcomes.add("waiter")
        elif polling_is_sound(facts):
            assert isinstance(choose("auto", facts), PollingProgress)
            outcomes.add("polling")
        else:
            with pytest.raises(CommError) as caught:
                choose("auto", facts)
            assert caught.value.kind is ErrorKind.UNSUPPORTED
            assert "waiters need" in caught.value.cause
            assert "polling needs" in caught.value.cause
            outcomes.add("refused")
    assert outcomes == {"waiter", "polling", "refused"}


@pytest.mark.parametrize(
    ("preference", "sound", "kind"),
    [
        ("waiter", waiters_are_sound, WaiterProgress),
        ("polling", polling_is_sound, PollingProgress),
    ],
)
def test_a_preference_is_granted_exactly_where_it_is_sound(
    preference: str, sound: Callable[[Semantics], bool], kind: type
) -> None:
    for facts in COMBINATIONS:
        if sound(facts):
            assert isinstance(choose(preference, facts), kind)
        else:
            with pytest.raises(CommError) as caught:
                choose(preference, facts)
            assert caught.value.kind is ErrorKind.CONFIG
            assert preference in caught.value.operation


@pytest.mark.parametrize(
    ("preference", "facts", "named"),
    [
        ("waiter", SERIALIZED, "threads = MULTIPLE, declared is SERIALIZED"),
        ("waiter", replace(WAITED, progress=Progress.ONLY_IN_CALLS), "declared is ONLY_IN_CALLS"),
        ("polling", WAITED, "poll = EXACT, declared is NEVER_BEFORE_WAIT"),
    ],
)
def test_an_unsound_preference_is_refused_when_connecting(
    preference: str, facts: Semantics, named: str
) -> None:
    with pytest.raises(CommError, match=named):
        connect_rank(Hub(1, facts), 0, progress=preference)


class Paused:
    """A lane that waits for an event with a limit; nobody sets the event."""

    name = "paused"
    wanted = False

    def __init__(self) -> None:
        self.over = threading.Event()
        self.never = threading.Event()

    def steps(self) -> Procedure:
        yield Wait(self.never, 0.01)
        self.over.set()

    def abandon(self, error: BaseException) -> None:
        raise error

    def notice(self, sequence: int) -> None:
        pass

    def wake(self) -> None:
        pass


@pytest.mark.parametrize("engine", ["waiter", "direct", "polling", "polling inside calls"])
def test_a_wait_with_a_limit_ends_in_every_engine(engine: str) -> None:
    runtime = ThreadRuntime()
    driver: ProgressEngine
    if engine.startswith("polling"):
        driver = PollingProgress(runtime, background=engine == "polling")
    else:
        driver = WaiterProgress(runtime) if engine == "waiter" else DirectProgress(runtime)
    lane = Paused()
    driver.start(lane)
    assert driver.block(lane.over, 30)
    assert driver.join([lane], Deadline(runtime.now, 30))
    driver.stop()


# Driving

DRIVEN = {
    "waiter": (WAITED, "safe"),
    "direct": (WAITED, "direct"),
    "polling, serialized": (SERIALIZED, "safe"),
    "polling, multiple": (replace(SERIALIZED, threads=Threads.MULTIPLE), "safe"),
}


@pytest.fixture(params=DRIVEN.values(), ids=DRIVEN)
def facts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Semantics:
    semantics, wait_mode = request.param
    monkeypatch.setitem(DEFAULTS, "wait_mode", wait_mode)
    return semantics  # type: ignore[no-any-return]


def test_direct_waits_are_for_waiters_only() -> None:
    runtime = ThreadRuntime()
    assert isinstance(choose_progress("auto", WAITED, runtime, "", direct=True), DirectProgress)
    polled = choose_progress("auto", SERIALIZED, runtime, "", direct=True)
    assert isinstance(polled, PollingProgress)


def settled(handle: Handle) -> threading.Event:
    """Set once nobody but the layer's own driver has completed `handle`."""
    event = threading.Event()

    def watch() -> None:
        while not handle._operation.settled:  # type: ignore[attr-defined]
            if event.wait(0.001):
                return
        event.set()

    threading.Thread(target=watch, daemon=True).start()
    return event


def test_operations_complete_without_a_call(facts: Semantics) -> None:
    with connected(semantics=facts) as (a, b):
        receive = b.irecv(None, 0)
        send = a.isend(torch.arange(5000.0), 1)
        assert settled(receive).wait(30)
        assert settled(send).wait(30)
        assert torch.equal(receive.result(), torch.arange(5000.0))


def test_a_lane_that_is_stuck_holds_up_no_other(facts: Semantics) -> None:
    with connected(size=3, semantics=facts) as (a, b, c):
        stuck = [a.isend(torch.zeros(5000), 1), a.isend(torch.zeros(5000), 2, tag=1)]
        waiting = a.irecv(None, 1, tag=9)
        for i in range(5):
            a.isend(torch.full((5000,), float(i)), 2)
            assert c.recv(None, 0)[0] == i
        assert not any(handle.is_completed() for handle in [*stuck, waiting])
        b.recv(None, 0)
        c.recv(None, 0, tag=1)
        for handle in stuck:
            handle.wait(30)


def test_both_directions_and_all_kinds_at_once(facts: Semantics) -> None:
    hub = Hub(3, facts)
    assert on_every_rank(hub, lambda rank: everything(hub, rank)) == [None] * 3
    assert hub.violations == []


def test_a_funneled_transport_is_called_by_its_owner_only() -> None:
    hub = Hub(3, FUNNELED)
    assert on_every_rank(hub, lambda rank: everything(hub, rank)) == [None] * 3
    assert hub.violations == []


def everything(hub: Hub, rank: int) -> None:
    with connect_rank(hub, rank) as comm:
        others = [peer for peer in range(3) if peer != rank]
        for i in range(10):
            for peer in others:
                comm.isend(torch.full((3000,), float(i)), peer)
                comm.isend(torch.full((3,), float(i)), peer, tag=1)
                comm.isend_tensor_dict({"i": i, "t": torch.full((4000,), float(i))}, peer)
        dicts = [comm.irecv_tensor_dict(peer) for peer in others]
        for i in range(10):
            for peer in others:
                assert comm.recv(None, peer, tag=1).tolist() == [i] * 3
                assert comm.recv(torch.empty(3000), peer).sum() == 3000 * i
        for peer, handle in zip(others, dicts, strict=True):
            assert handle.result(30)["i"] == 0
            for i in range(1, 10):
                assert comm.recv_tensor_dict(peer)["t"][0] == i
        for src in range(3):
            assert comm.broadcast_object(f"from {rank}", src) == f"from {src}"
        comm.drain(30)
        assert comm.ledger.snapshot().operations == ()


def test_off_the_owners_thread_a_funneled_wait_is_served_by_the_owner() -> None:
    hub = Hub(2, FUNNELED)

    def body(rank: int) -> float | None:
        with connect_rank(hub, rank) as comm:
            if rank == 0:
                comm.send(torch.full((5000,), 7.0), 1)
                return None
            handle = comm.irecv(None, 0)
            results: list[float] = []
            thread = threading.Thread(target=lambda: results.append(handle.result(30)[0].item()))
            thread.start()
            while thread.is_alive():
                handle.is_completed()
                thread.join(0.001)
            return results[0]

    assert on_every_rank(hub, body) == [None, 7.0]
    assert hub.violations == []


def test_a_funneled_wait_honours_its_limit() -> None:
    hub = Hub(2, FUNNELED)

    def body(rank: int) -> None:
        with connect_rank(hub, rank) as comm:
            if rank == 0:
                with pytest.raises(CommTimeout):
                    comm.irecv(None, 1).wait(0.01)
            comm.isend_object("done", 1 - rank)
            assert comm.recv_object(1 - rank) == "done"

    on_every_rank(hub, body)


def test_a_delivered_send_does_not_fail_because_the_receiver_closes(facts: Semantics) -> None:
    for _ in range(20):
        with connected(semantics=facts) as (a, b):
            receive = b.irecv(None, 0)
            send = a.isend(torch.ones(5000), 1)
            receive.wait(30)
            b.close(10)
            send.wait(30)


# Death of a driver


class Defect(BaseException):
    """What no procedure expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_nobody_waits_for_a_driver_that_died(facts: Semantics) -> None:
    hub = Hub(2, facts)
    with connected(hub=hub, close_timeout=0.5) as (a, _):
        handles = [
            *[a.isend(torch.ones(5000), 1) for _ in range(3)],
            *[a.irecv(None, 1, tag=1) for _ in range(3)],
            a.irecv_object(1),
        ]
        watchers = [settled(handle) for handle in handles]
        hub.fail(0, Defect("a defect"))
        for handle, watcher in zip(handles, watchers, strict=True):
            assert watcher.wait(30)
            with pytest.raises(CommError, match="the task that drives it died") as caught:
                handle.wait(30)
            assert caught.value.kind is ErrorKind.PROTOCOL
            assert str(caught.value) == str(handle.exception())
        for again in (lambda: a.irecv(None, 1, tag=1), lambda: a.isend(torch.ones(1), 1)):
            with pytest.raises(CommError):
                again().wait(30)


def listens(comm: Communicator) -> bool:
    """Whether every lane has posted the receives that it keeps posted."""
    lanes = [lane for peer in comm._connection.peers.values() for lane in peer.receives.values()]
    return all(len(lane._posted) == lane._prefetch.headers for lane in lanes)


def test_a_native_error_loses_the_peer_and_no_other(facts: Semantics) -> None:
    hub = Hub(3, facts)
    with connected(hub=hub, close_timeout=0.5) as (a, _, c):
        lost = [a.isend(torch.ones(5000), 1), a.irecv(None, 1), a.irecv_object(1)]
        kept = a.irecv(None, 2)
        assert eventually(lambda: listens(a)), "a lane has not posted its receives"
        hub.kill(1)
        for handle in lost:
            with pytest.raises(CommError, match="reset by peer") as caught:
                handle.wait(30)
            assert caught.value.kind is ErrorKind.PEER_LOST
        c.isend(torch.ones(5000), 0)
        assert kept.result(30).sum() == 5000
        with pytest.raises(CommError, match="rank 1") as caught:
            a.isend(torch.ones(1), 1)
        assert caught.value.kind is ErrorKind.PEER_LOST


def test_an_interrupt_inside_a_procedure_fails_its_lane_and_reaches_the_caller() -> None:
    """Ctrl-C where the caller's own thread drives the lanes."""
    hub = Hub(2, FUNNELED)

    class Interrupted(HoldNothing):
        def reapable(self, entries: Any) -> int:
            if armed and any(entry.settled for entry in entries):
                armed.pop()
                raise KeyboardInterrupt
            return super().reapable(entries)

    armed: list[int] = []

    def body(rank: int) -> None:
        policy = Interrupted() if rank == 0 else "background"
        with connect_rank(hub, rank, reaping=policy, close_timeout=0.5) as comm:
            if rank == 1:
                comm.recv(None, 0)
                comm.recv_object(0)
                return
            sends = [comm.isend(torch.ones(5000), 1) for _ in range(3)]
            armed.append(1)
            with pytest.raises(KeyboardInterrupt):
                sends[1].wait(30)
            with pytest.raises(CommError, match="the task that drives it died"):
                sends[2].wait(30)
            comm.send_object("another lane", 1)

    on_every_rank(hub, body)


class HoldNothing(BackgroundReaping):
    name = "interrupted"
