"""Known-bad policies on host transports, each beside its cure.

The policies are written out on raw works, as engines wrote them; nothing here
uses the library's own retention or progress.
"""

from __future__ import annotations

from typing import Any

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.profiles import GLOO, MPI
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario
from commlayer_testkit.sim.transport import SimEndpoint
from commlayer_testkit.sim.world import World

HOST = ("gloo", "gloo_early_poll", "mpi_rendezvous")
META, PAYLOAD = 1, 2


def receive_dict(data: SimEndpoint, src: int) -> Any:
    """Blocking metadata, then the payload."""
    data.recv(blank(16), src, META)
    tensor = blank()
    data.recv(tensor, src, PAYLOAD)
    return tensor


# -- blocking metadata ------------------------------------------------------------


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def blocking_metadata(rank: Rank) -> None:
    """An "async" dict send blocks while it sends its metadata; both ranks send first."""
    data, peer = rank.endpoint(), 1 - rank.index
    with rank.naming(f"metadata of rank {rank.index}"):
        data.send(filled(1, 16), peer, META)
    work = data.isend(filled(2), peer, PAYLOAD)
    receive_dict(data, peer)
    work.wait()


@scenario(*HOST)
@on_ranks(2)
def async_metadata(rank: Rank) -> None:
    """The cure: metadata and payload are both posted; both ranks send first."""
    data, peer = rank.endpoint(), 1 - rank.index
    header, payload = filled(1, 16), filled(2)
    works = [data.isend(header, peer, META), data.isend(payload, peer, PAYLOAD)]
    assert int(receive_dict(data, peer)[0]) == 2
    for work in works:
        work.wait()


# -- dropped handles ----------------------------------------------------------------


@scenario("gloo", "gloo_early_poll", expect=FailureKind.LOST_MESSAGE)
@on_ranks(2)
def dropped_handle(rank: Rank) -> None:
    """The caller drops the work of a send; the message and the pair are lost."""
    data = rank.endpoint()
    if rank.index == 0:
        data.isend(filled(7, 16), 1)
        data.send(filled(8, 16), 1)
    else:
        tensor = blank(16)
        data.recv(tensor, 0)
        data.recv(tensor, 0)


@scenario("mpi_rendezvous", "oneccl_cpu", "adversary", expect=FailureKind.USE_AFTER_FREE)
@on_ranks(2)
def dropped_request(rank: Rank) -> None:
    """The caller drops work and tensor of a send; the transport reads freed memory."""
    data = rank.endpoint()
    if rank.index == 0:
        data.isend(filled(7, 8192), 1)
    else:
        data.recv(blank(8192), 0)


@scenario(*HOST, "adversary")
@on_ranks(2)
def kept_handle(rank: Rank) -> None:
    """The cure: works and tensors are kept until each work was waited once."""
    data = rank.endpoint()
    if rank.index == 0:
        kept = []
        for value in (7, 8):
            tensor = filled(value, 16)
            kept.append((data.isend(tensor, 1), tensor))
        for work, _ in kept:
            work.wait()
    else:
        for value in (7, 8):
            tensor = blank(16)
            data.recv(tensor, 0)
            assert int(tensor[0]) == value


# -- reaping ------------------------------------------------------------------------


def _reaped_on_poll(world: World, sends: int = 2) -> None:
    """Each send is kept until its poll says yes, asked before each post and when idle."""
    kept: list[Any] = []

    def reap() -> None:
        while kept and kept[0][0].is_completed():
            kept.pop(0)

    def body(rank: Rank) -> None:
        data = rank.endpoint()
        if rank.index == 0:
            for value in range(sends):
                reap()
                tensor = filled(value, 16)
                kept.append((data.isend(tensor, 1), tensor))
                del tensor
            reap()
            for _ in range(3):
                rank.sleep(1.0)
                reap()
        else:
            for _ in range(sends):
                data.recv(blank(16), 0)

    def check() -> None:
        if kept:
            world.fail(
                FailureKind.LEAK, f"{len(kept)} delivered sends are still retained at quiescence"
            )

    world.start(2, body)
    world.at_end(check)


@scenario("gloo", expect=FailureKind.LEAK)
def reap_on_poll_that_never_turns_true(world: World) -> None:
    """Reaping gated on a poll that says no until somebody waits: nothing is ever released."""
    _reaped_on_poll(world)


@scenario("adversary", expect=FailureKind.USE_AFTER_FREE)
def reap_on_early_poll(world: World) -> None:
    """Reaping gated on a poll that may be early: a source is freed under the transport."""
    _reaped_on_poll(world)


@scenario("gloo_early_poll", expect=FailureKind.LOST_MESSAGE)
def reap_on_early_poll_where_works_own(world: World) -> None:
    """The same where the work owns the tensor: the message is lost with it."""
    _reaped_on_poll(world, sends=1)


@scenario("mpi_rendezvous")
def reap_on_exact_poll(world: World) -> None:
    """Where the poll is exact the same policy is right."""
    _reaped_on_poll(world)


@scenario("gloo", "gloo_early_poll")
@on_ranks(2)
def reap_by_waiter(rank: Rank) -> None:
    """The cure for other polls: one waiter waits each work once, in order, then releases it."""
    data = rank.endpoint()
    if rank.index == 1:
        for _ in range(2):
            data.recv(blank(16), 0)
        return
    kept: list[Any] = []
    posted = rank.event("posted")

    def waiter() -> None:
        for _ in range(2):
            while not kept:
                posted.wait()
                posted.clear()
            kept[0][0].wait()
            kept.pop(0)

    lane = rank.spawn(waiter, "waiter")
    for value in range(2):
        tensor = filled(value, 16)
        kept.append((data.isend(tensor, 1), tensor))
        posted.set()
    lane.join()
    assert not kept, "still retained"


@scenario("gloo", "gloo_early_poll", expect=FailureKind.LOST_MESSAGE)
@on_ranks(2)
def metadata_only_popped(rank: Rank) -> None:
    """A dict without tensors has nothing to gate on: its entry is popped without a wait."""
    data = rank.endpoint()
    if rank.index == 1:
        data.recv(blank(16), 0, META)
        return
    kept: list[tuple[list[Any], list[Any]]] = []
    header = filled(1, 16)
    kept.append(([data.isend(header, 1, META)], []))
    del header
    while kept and all(work.is_completed() for work in kept[0][1]):
        kept.pop(0)


@scenario("gloo", "gloo_early_poll", expect=FailureKind.ERROR)
@on_ranks(2)
def double_wait(rank: Rank) -> None:
    """A work is waited by its caller and again by the reaper: the group dies."""
    data = rank.endpoint()
    if rank.index == 0:
        work = data.isend(filled(1), 1)
        work.wait()
        work.wait()
    else:
        data.recv(blank(), 0)


@scenario("gloo", "gloo_early_poll", expect=FailureKind.ERROR)
@on_ranks(2)
def native_timeout(rank: Rank) -> None:
    """A limit handed to a native wait whose expiry destroys the group."""
    data = rank.endpoint()
    if rank.index == 0:
        work = data.isend(filled(1), 1)
        try:
            work.wait(timeout=1.0)
        except RuntimeError:
            pass
        data.send(filled(2), 1)
    else:
        rank.sleep(5.0)
        data.recv(blank(), 0)


# -- overwriting --------------------------------------------------------------------


@scenario("gloo", "gloo_early_poll", "mpi_rendezvous", expect=FailureKind.OVERWRITTEN)
@on_ranks(2)
def overwrite_before_completion(rank: Rank) -> None:
    """Retained but overwritten: the next step writes into a buffer that is still being sent."""
    data = rank.endpoint()
    if rank.index == 0:
        hidden = filled(1, 16)
        work = data.isend(hidden, 1)
        hidden.fill_(2)
        work.wait()
    else:
        data.recv(blank(16), 0)


@scenario(*HOST, "adversary")
@on_ranks(2)
def overwrite_after_completion(rank: Rank) -> None:
    """The cure: the buffer is written again only after the wait."""
    data = rank.endpoint()
    hidden = filled(1, 16)
    for step in (1, 2):
        if rank.index == 0:
            hidden.fill_(step)
            data.send(hidden, 1)
        else:
            data.recv(hidden, 0)
            assert int(hidden[0]) == step


# -- broadcasts -----------------------------------------------------------------------


@scenario("gloo", "mpi_rendezvous", expect=FailureKind.OVERWRITTEN)
@on_ranks(2)
def broadcast_slot_overwritten(rank: Rank) -> None:
    """One slot holds the tokens of every step; a step writes it while a broadcast is pending."""
    tokens = rank.endpoint("tokens")
    if rank.index == 0:
        slot = blank()
        works = []
        for step in (1, 2):
            slot.fill_(step)
            works.append(tokens.broadcast(slot, 0))
        for work in works:
            work.wait()
    else:
        for _ in (1, 2):
            tokens.broadcast(blank(), 0).wait()


@scenario("gloo", "mpi_rendezvous", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def conditional_broadcast(rank: Rank) -> None:
    """Each rank decides from its own view whether a step broadcasts; the views differ."""
    tokens, data = rank.endpoint("tokens"), rank.endpoint()
    for step in (0, 1):
        samples = rank.index == 0 or step == 1
        if samples:
            slot = filled(step)
            with rank.naming(f"tokens of step {step}"):
                tokens.broadcast(slot, 0).wait()
        if rank.index == 0:
            data.send(filled(step, 16), 1)
        else:
            data.recv(blank(16), 0)


@scenario("gloo", "mpi_rendezvous", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def broadcast_one_ahead(rank: Rank) -> None:
    """Ranks disagree on the number of broadcasts in a step; one waits for another more."""
    tokens = rank.endpoint("tokens")
    for count in range(3 if rank.index else 2):
        slot = filled(count)
        with rank.naming(f"broadcast {count}"):
            tokens.broadcast(slot, 0).wait()


# -- progress ---------------------------------------------------------------------------


@scenario("gloo", "gloo_early_poll", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def one_progress_thread(rank: Rank) -> None:
    """One thread carries out a rank's operations one after another, a receive before a send."""
    data, peer = rank.endpoint(), 1 - rank.index

    def progress() -> None:
        with rank.naming("queued receive"):
            data.recv(blank(16), peer)
        data.send(filled(1, 16), peer)

    rank.spawn(progress, "progress").join()


@scenario("gloo", "gloo_early_poll")
@on_ranks(2)
def one_thread_per_lane(rank: Rank) -> None:
    """The cure: a thread for each lane."""
    data, peer = rank.endpoint(), 1 - rank.index
    threads = [
        rank.spawn(lambda: data.recv(blank(16), peer), "receiver"),
        rank.spawn(lambda: data.send(filled(1, 16), peer), "sender"),
    ]
    for thread in threads:
        thread.join()


def _batch(rank: Rank, *, receives_first: bool) -> None:
    data, peer = rank.endpoint(), 1 - rank.index

    def receive() -> None:
        data.recv(blank(), peer)

    def send() -> None:
        data.send(filled(1), peer)

    for call in (receive, send) if receives_first else (send, receive):
        call()


@scenario("mpi_rendezvous", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def receive_before_send_in_a_batch(rank: Rank) -> None:
    """A batch runs in the order of its list, and the receive is listed first."""
    _batch(rank, receives_first=True)


@scenario("mpi")
@on_ranks(2)
def send_before_receive_in_a_batch(rank: Rank) -> None:
    """The cure: sends first, which an eager transport completes at once."""
    _batch(rank, receives_first=False)


def _awaits_reply(rank: Rank, *, driven: bool) -> None:
    """A send is posted; its wait sits behind the wait for a reply on another transport."""
    data, reply = rank.endpoint(), rank.endpoint("reply", GLOO)
    if rank.index == 1:
        data.recv(blank(64), 0)
        reply.send(filled(1), 0)
        return
    payload = filled(1, 64)
    work = data.isend(payload, 1)
    if driven:

        def driver() -> None:
            while not work.is_completed():
                rank.sleep(0.01)

        rank.spawn(driver, "driver")
    with rank.naming("reply"):
        reply.recv(blank(), 1)
    if not driven:
        work.wait()


@scenario("mpi_rendezvous", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def progress_behind_another_wait(rank: Rank) -> None:
    """Nothing moves outside calls, and the call that would drive the send comes too late."""
    _awaits_reply(rank, driven=False)


@scenario("mpi_rendezvous")
@on_ranks(2)
def progress_by_a_driver(rank: Rank) -> None:
    """The cure: a driver polls in the background."""
    _awaits_reply(rank, driven=True)


def _backstop(rank: Rank, *, on_posting_path: bool) -> None:
    """Payloads complete eagerly; metadata is a rendezvous and waited as a backstop."""
    meta, data = rank.endpoint("metadata", GLOO), rank.endpoint("payload", MPI)
    go = rank.endpoint("go", GLOO)
    if rank.index == 1:
        with rank.naming("go"):
            go.recv(blank(), 0)
        for _ in range(2):
            meta.recv(blank(16), 0)
            data.recv(blank(), 0)
        return
    kept: list[Any] = []
    for step in range(2):
        if on_posting_path and kept and kept[0][1].is_completed():
            kept[0][0].wait()
            kept.pop(0)
        header, payload = filled(1, 16), filled(step)
        with rank.naming(f"metadata of step {step}"):
            kept.append((meta.isend(header, 1), data.isend(payload, 1), header, payload))
    go.send(filled(1), 1)
    for entry in kept:
        entry[0].wait()
        entry[1].wait()


@scenario("gloo", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def backstop_on_the_posting_path(rank: Rank) -> None:
    """A payload completes before the peer posts; the next send waits the metadata of the last."""
    _backstop(rank, on_posting_path=True)


@scenario("gloo")
@on_ranks(2)
def backstop_off_the_posting_path(rank: Rank) -> None:
    """The cure: posting never waits."""
    _backstop(rank, on_posting_path=False)


def _bounded(rank: Rank, bound: int) -> None:
    """Two sends each way; at `bound` sends in flight the next one waits for room."""
    data, peer = rank.endpoint(), 1 - rank.index
    inflight: list[Any] = []
    for step in range(2):
        if len(inflight) == bound:
            inflight.pop(0)[0].wait()
        tensor = filled(step, 16)
        with rank.naming(f"send {step} of rank {rank.index}"):
            inflight.append((data.isend(tensor, peer), tensor))
    for _ in range(2):
        data.recv(blank(16), peer)
    for work, _ in inflight:
        work.wait()


@scenario(*HOST, expect=FailureKind.DEADLOCK)
@on_ranks(2)
def opposite_sends_at_the_bound(rank: Rank) -> None:
    """At the bound a send waits for room, on both ranks, before either receives."""
    _bounded(rank, 1)


@scenario(*HOST)
@on_ranks(2)
def opposite_sends_below_the_bound(rank: Rank) -> None:
    """Below the bound nothing blocks."""
    _bounded(rank, 2)


# -- order ----------------------------------------------------------------------------


@scenario("unordered", expect=FailureKind.ERROR)
@on_ranks(2)
def two_sends_may_overtake(rank: Rank) -> None:
    """Two sends of one pair are outstanding on a transport that is not first in, first out."""
    data = rank.endpoint()
    if rank.index == 0:
        sources = [filled(1), filled(2)]
        works = [data.isend(source, 1) for source in sources]
        for work in works:
            work.wait()
    else:
        for value in (1, 2):
            tensor = blank()
            data.recv(tensor, 0)
            assert int(tensor[0]) == value, f"expected message {value}, got {int(tensor[0])}"


@scenario("oneccl_cpu", expect=FailureKind.MISUSE)
@on_ranks(2)
def more_outstanding_than_declared(rank: Rank) -> None:
    """The declared limit on outstanding operations of a pair is ignored."""
    data = rank.endpoint()
    if rank.index == 0:
        sources = [filled(1, 8192), filled(2, 8192)]
        works = [data.isend(source, 1) for source in sources]
        for work in works:
            work.wait()
    else:
        for _ in range(2):
            data.recv(blank(8192), 0)


@scenario("gloo", expect=FailureKind.ABORT)
@on_ranks(2)
def receive_too_small(rank: Rank) -> None:
    """A receive smaller than its message."""
    data = rank.endpoint()
    if rank.index == 0:
        data.send(filled(1, 16), 1)
    else:
        data.recv(blank(8), 0)
