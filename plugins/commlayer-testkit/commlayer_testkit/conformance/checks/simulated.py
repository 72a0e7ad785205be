"""L1: the library on the declared facts, under all schedules that the search covers.

The simulated transport itself reports memory read after its free, overwrites,
lost messages and calls that the facts forbid; `Stage` checks that nothing is left.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from commlayer.communicator import Communicator
from commlayer.errors import ErrorKind
from commlayer.handle import Handle
from commlayer_testkit.conformance.checks.tools import expect_error, expires
from commlayer_testkit.conformance.gates import ANY_THREAD, HOST_MEMORY, WAITED_IN
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.simulated import Stage
from commlayer_testkit.conformance.verdict import NotApplicable
from commlayer_testkit.sim.rank import Rank

_HOUR = 3600.0


def two_dropped(stage: Stage, rank: Rank, **config: Any) -> None:
    """Rank 0 sends two tensors and drops them and the handles; rank 1 receives them in order."""
    comm = stage.connect(rank, **config)
    if rank.index == 0:
        for value in (1, 2):
            comm.isend(stage.source(rank, value), 1)
        comm.drain()
    else:
        for value in (1, 2):
            stage.expect(rank, comm.recv(stage.target(rank), 0), value)


@rule(Level.L1, "post-returns")
def post_returns(lab: Lab) -> None:
    """Both ranks post a tensor and a dict send before either receives."""

    def body(stage: Stage, rank: Rank) -> None:
        comm, peer = stage.connect(rank), 1 - rank.index
        sends = [
            comm.isend(stage.source(rank, rank.index), peer),
            comm.isend_tensor_dict({"t": stage.source(rank, 2), "step": 3}, peer),
        ]
        stage.expect(rank, comm.recv(stage.target(rank), peer), peer)
        got = comm.recv_tensor_dict(peer)
        assert got["step"] == 3
        stage.expect(rank, got["t"], 2)
        for send in sends:
            send.wait()

    lab.explore(body)


@rule(Level.L1, "wait-usable")
def wait_usable(lab: Lab) -> None:
    """Sources of two sizes, that travel without a copy, are overwritten after each wait; results
    are used.  Where there is a device, then again on a side stream."""

    def exchange(stage: Stage, rank: Rank, comm: Communicator, size: int) -> None:
        if rank.index == 0:
            hidden = stage.source(rank, 0, size)
            for step in (1, 2):
                stage.overwrite(rank, hidden, step)
                comm.isend(hidden, 1).wait()
            stage.overwrite(rank, hidden, 9)
        else:
            for step in (1, 2):
                stage.expect(rank, comm.recv(stage.target(rank, size), 0), step)

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=0)
        exchange(stage, rank, comm, 16)
        exchange(stage, rank, comm, 64)
        if stage.on_device:
            with rank.device.stream("side"):
                exchange(stage, rank, comm, 16)

    lab.explore(body)


@rule(Level.L1, "wait-again")
def wait_again(lab: Lab) -> None:
    """Handles of both directions are waited twice, the second time in reverse order."""

    def body(stage: Stage, rank: Rank) -> None:
        comm, peer = stage.connect(rank, inline_bytes=0), 1 - rank.index
        handles: list[Handle] = [
            comm.irecv(stage.target(rank), peer),
            comm.isend(stage.source(rank, rank.index), peer),
        ]
        for handle in (*handles, *reversed(handles)):
            handle.wait()
        stage.expect(rank, handles[0].result(), peer)

    lab.explore(body)


@rule(Level.L1, "wait-threads", ANY_THREAD)
def wait_threads(lab: Lab) -> None:
    """Two tasks wait for one send, one of them with a limit."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 1:
            stage.expect(rank, comm.recv(stage.target(rank), 0), 6)
        else:
            handle = comm.isend(stage.source(rank, 6), 1)
            waiter = rank.spawn(lambda: handle.synchronize(), "second waiter")
            handle.synchronize(timeout=100.0)
            waiter.join()

    lab.explore(body)


@rule(Level.L1, "timeout-harmless")
def timeout_harmless(lab: Lab) -> None:
    """A receive is waited with a limit before the peer sends, and again afterwards."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 0:
            rank.sleep(2.0)
            comm.send(stage.source(rank, 4), 1)
        else:
            handle = comm.irecv(stage.target(rank), 0)
            assert expires(handle.synchronize, 1.0), (
                "the wait of a message that was not sent returned"
            )
            stage.expect(rank, handle.result(), 4)

    lab.explore(body)


@rule(Level.L1, "timeout-transfer")
def timeout_transfer(lab: Lab) -> None:
    """Limits expire at any moment of a transfer: the clock may jump twice."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 0:
            comm.send(stage.source(rank, 3), 1)
        else:
            handle = comm.irecv(stage.target(rank), 0)
            for _ in range(2):
                expires(handle.synchronize, 1.0)
            stage.expect(rank, handle.result(), 3)

    lab.explore(body, early_ticks=2)


@rule(Level.L1, "completed-exact")
def completed_exact(lab: Lab) -> None:
    """A source is overwritten as soon as `is_completed` says so, a result is then used."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=0)
        if rank.index == 0:
            source = stage.source(rank, 5, 64)
            handle: Handle = comm.isend(source, 1)
            while not handle.is_completed():
                rank.sleep(0.1)
            stage.overwrite(rank, source, 9)
        else:
            handle = comm.irecv(stage.target(rank, 64), 0)
            while not handle.is_completed():
                rank.sleep(0.1)
            stage.expect(rank, handle.result(), 5)

    lab.explore(body, early_ticks=3)


@rule(Level.L1, "dropped-handle")
def dropped_handle(lab: Lab) -> None:
    """Handles and tensors of two sends are dropped at once."""
    lab.explore(two_dropped)


@rule(Level.L1, "alive")
def alive(lab: Lab) -> None:
    """Inline, separate and empty sources, and one of a side stream, are dropped at once; all are
    read before their free."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=32)
        sizes = (16, 0, 64, 48)
        if rank.index == 0:
            for size in sizes[:-1]:
                comm.isend(stage.source(rank, 7, size), 1)
            with rank.device.stream("side") if stage.on_device else nullcontext():
                comm.isend(stage.source(rank, 7, sizes[-1]), 1)
            comm.drain()
        else:
            for size in sizes:
                got = comm.recv(stage.target(rank, size), 0)
                assert got.numel() == size
                if size:
                    stage.expect(rank, got, 7)

    lab.explore(body)


@rule(Level.L1, "idle", ANY_THREAD, WAITED_IN)
def idle(lab: Lab) -> None:
    """A receive is pending, and another is being waited for, during an hour of silence."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 0:
            rank.sleep(_HOUR)
            for tag in (0, 1):
                comm.send(stage.source(rank, tag), 1, tag=tag)
        else:
            pending = comm.irecv(stage.target(rank), 0, tag=1)
            stage.expect(rank, comm.recv(stage.target(rank), 0), 0)
            stage.expect(rank, pending.result(), 1)

    lab.explore(body)


@rule(Level.L1, "released", ANY_THREAD)
def released(lab: Lab) -> None:
    """Under each reaping policy of the core, all is released before it was waited for."""
    for policy in ("background", "fifo"):

        def body(stage: Stage, rank: Rank, policy: str = policy) -> None:
            comm = stage.connect(rank, reaping=policy, inline_bytes=0)
            if rank.index == 0:
                for value in (1, 2):
                    comm.isend(stage.source(rank, value), 1)
                while comm.ledger.snapshot().sends:
                    rank.sleep(0.1)
                    comm.ledger.reap()
            else:
                for value in (1, 2):
                    stage.expect(rank, comm.recv(stage.target(rank), 0), value)

        lab.explore(body, schedules=max(1, lab.schedules // 2))


@rule(Level.L1, "copy-on-post", HOST_MEMORY)
def copy_on_post(lab: Lab) -> None:
    """The source is overwritten right after the post."""
    if lab.subject.companion() is not None:
        raise NotApplicable("the copy is work of a device stream, and no call that is simulated")

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, retention="copy_on_post", inline_bytes=0)
        if rank.index == 0:
            source = stage.source(rank, 1)
            handle = comm.isend(source, 1)
            stage.overwrite(rank, source, 9)
            handle.wait()
        else:
            stage.expect(rank, comm.recv(stage.target(rank), 0), 1)

    lab.explore(body)


@rule(Level.L1, "bounded")
def bounded(lab: Lab) -> None:
    """With a bound of one send, two are posted; the second waits for room."""

    def body(stage: Stage, rank: Rank) -> None:
        two_dropped(stage, rank, max_inflight_ops=1)

    lab.explore(body)


@rule(Level.L1, "order")
def order(lab: Lab) -> None:
    """Five outstanding sends each way are received in the order of their posts."""

    def body(stage: Stage, rank: Rank) -> None:
        comm, peer = stage.connect(rank, inline_bytes=0), 1 - rank.index
        receives = [comm.irecv(stage.target(rank), peer) for _ in range(5)]
        for number in range(5):
            comm.isend(stage.source(rank, 10 * rank.index + number), peer)
        for number, receive in enumerate(receives):
            stage.expect(rank, receive.result(), 10 * peer + number)
        comm.drain()

    lab.explore(body)


@rule(Level.L1, "unexpected")
def unexpected(lab: Lab) -> None:
    """Three messages come before anybody asks, who then asks for one a second."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 0:
            for value in (1, 2, 3):
                comm.isend(stage.source(rank, value), 1)
            comm.drain()
        else:
            for value in (1, 2, 3):
                rank.sleep(1.0)
                stage.expect(rank, comm.recv(stage.target(rank), 0), value)

    lab.explore(body)


@rule(Level.L1, "tags-independent")
def tags_independent(lab: Lab) -> None:
    """The message of tag 1 is sent first and asked for last."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        if rank.index == 0:
            comm.isend(stage.source(rank, 1), 1, tag=1)
            comm.isend(stage.source(rank, 2), 1, tag=2)
            comm.drain()
        else:
            for tag in (2, 1):
                stage.expect(rank, comm.recv(stage.target(rank), 0, tag=tag), tag)

    lab.explore(body)


@rule(Level.L1, "channels-independent")
def channels_independent(lab: Lab) -> None:
    """A send on `data` waits for a receive that its peer posts only after one on `control`."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=0)
        control = comm.channel("control")
        if rank.index == 0:
            comm.isend(stage.source(rank, 1), 1)
            control.isend(stage.source(rank, 2), 1)
            comm.drain()
        else:
            stage.expect(rank, control.recv(stage.target(rank), 0), 2)
            stage.expect(rank, comm.recv(stage.target(rank), 0), 1)

    lab.explore(body)


@rule(Level.L1, "peers-independent")
def peers_independent(lab: Lab) -> None:
    """Three ranks, each sends to the next and receives from the one before."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        send = comm.isend(stage.source(rank, rank.index), (rank.index + 1) % 3)
        before = (rank.index - 1) % 3
        stage.expect(rank, comm.recv(stage.target(rank), before), before)
        send.wait()

    lab.explore(body, 3, schedules=max(1, lab.schedules // 2))


@rule(Level.L1, "broadcast")
def broadcast(lab: Lab) -> None:
    """Two broadcasts in flight, each of its own width."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank)
        widths = (8, 24)
        handles = []
        for step, width in enumerate(widths):
            tensor = stage.source(rank, step, width) if rank.index == 0 else None
            handles.append(comm.broadcast(tensor, 0, async_op=True))
            del tensor
        for step, width in enumerate(widths):
            result = handles.pop(0).result()
            assert result.numel() == width
            stage.expect(rank, result, step)
            del result
        comm.drain()

    lab.explore(body)


@rule(Level.L1, "size-mismatch")
def size_mismatch(lab: Lab) -> None:
    """A message of 64 bytes meets a receive of 16; the next receive gets it, then the next one."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=0)
        if rank.index == 0:
            comm.isend(stage.source(rank, 1, 64), 1)
            comm.isend(stage.source(rank, 2), 1)
            comm.drain()
        else:
            wrong = comm.irecv(stage.target(rank), 0)
            left, right = comm.irecv(None, 0), comm.irecv(stage.target(rank), 0)
            expect_error(ErrorKind.PROTOCOL, wrong.synchronize)
            stage.expect(rank, left.result(), 1)
            stage.expect(rank, right.result(), 2)

    lab.explore(body)


@rule(Level.L1, "drain")
def drain(lab: Lab) -> None:
    """After `drain` the handle of the send says complete."""

    def body(stage: Stage, rank: Rank) -> None:
        comm = stage.connect(rank, inline_bytes=0)
        if rank.index == 0:
            handle = comm.isend(stage.source(rank, 1), 1)
            comm.drain()
            assert handle.is_completed(), "drained, and not complete"
        else:
            rank.sleep(1.0)
            stage.expect(rank, comm.recv(stage.target(rank), 0), 1)

    lab.explore(body)


@rule(Level.L1, "close")
def close(lab: Lab) -> None:
    """Both ranks send, receive and close at once."""

    def body(stage: Stage, rank: Rank) -> None:
        comm, peer = stage.connect(rank), 1 - rank.index
        comm.isend(stage.source(rank, rank.index), peer)
        stage.expect(rank, comm.recv(stage.target(rank), peer), peer)
        stage.settle(rank)
        comm.close(timeout=60.0)

    lab.explore(body)
