"""What the library promises on every backend, under all schedules.

Each promise is stated here once.  The conformance kit plays it on the facts that
a backend declares (rule ``L1-NAME``), and as the scenario ``core_NAME`` it is played on
the profiles that it names.  The simulated transport itself reports memory read after
its free, overwrites, lost messages and calls that the facts forbid; `Stage` checks
that nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from commlayer.communicator import Communicator
from commlayer.errors import ErrorKind
from commlayer.handle import Handle
from commlayer_testkit.expecting import expect_error, expires
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenario import scenario
from commlayer_testkit.sim.stage import Stage
from commlayer_testkit.sim.world import World

CORE = (
    "gloo", "gloo_early_poll", "mpi", "mpi_rendezvous", "adversary", "adversary_serial",
    "adversary_polled",
)  # fmt: skip
BACKGROUND = tuple(name for name in CORE if name != "adversary_polled")
"""Messages move though no rank calls anything."""
TALKATIVE = ("gloo", "adversary", "adversary_serial")

_HOUR = 3600.0

Body = Callable[[Stage, Rank], object]


@dataclass(frozen=True)
class Promise:
    """A play of `size` ranks, each of which runs each of `bodies` as ``body(stage, rank)``.

    `doc` says what is played.  `early_ticks` is as of `World`.
    """

    doc: str
    bodies: tuple[Body, ...]
    size: int
    early_ticks: int


PROMISES: dict[str, Promise] = {}
"""By the name of the clause of the contract."""


def promise(
    clause: str, *profiles: str, size: int = 2, early_ticks: int = 0, also: tuple[Body, ...] = ()
) -> Callable[[Body], Body]:
    """Register the decorated body as what shows `clause`, and as a scenario on `profiles`.

    `also` are bodies that are to show it besides, and are no scenarios.
    """

    def register(body: Body) -> Body:
        doc = body.__doc__ or ""
        PROMISES[clause] = Promise(doc, (body, *also), size, early_ticks)

        def setup(world: World) -> None:
            Stage(world).start(body, size)

        setup.__name__ = "core_" + clause.replace("-", "_")
        setup.__doc__ = doc
        scenario(*profiles, early_ticks=early_ticks)(setup)
        return body

    return register


def each_way(stage: Stage, rank: Rank, count: int, **config: Any) -> None:
    """`count` tensors each way, in order; every handle is waited twice, the second time in reverse
    order."""
    comm, peer = stage.connect(rank, **config), 1 - rank.index
    receives = [comm.irecv(stage.target(rank), peer) for _ in range(count)]
    sends = [
        comm.isend(stage.source(rank, 10 * rank.index + number), peer) for number in range(count)
    ]
    for number, receive in enumerate(receives):
        stage.expect(rank, receive.result(), 10 * peer + number)
    handles: list[Handle] = [*receives, *sends]
    for handle in (*handles, *reversed(handles)):
        handle.wait()
        assert stage.on_device or handle.is_completed(), f"{handle!r} was waited, and is not over"


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


@promise("post-returns", *CORE)
def post_returns(stage: Stage, rank: Rank) -> None:
    """Both ranks post a tensor and a dict send before either receives."""
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


@promise("wait-usable", *CORE)
def wait_usable(stage: Stage, rank: Rank) -> None:
    """Sources of two sizes, that travel without a copy, are overwritten after each wait; results
    are used.  Where there is a device, then again on a side stream."""
    comm = stage.connect(rank, inline_bytes=0)
    _reuse(stage, rank, comm, 16)
    _reuse(stage, rank, comm, 64)
    if stage.on_device:
        with rank.device.stream("side"):
            _reuse(stage, rank, comm, 16)


def _reuse(stage: Stage, rank: Rank, comm: Communicator, size: int) -> None:
    if rank.index == 0:
        hidden = stage.source(rank, 0, size)
        for step in (1, 2):
            stage.overwrite(rank, hidden, step)
            comm.isend(hidden, 1).wait()
        stage.overwrite(rank, hidden, 9)
    else:
        for step in (1, 2):
            stage.expect(rank, comm.recv(stage.target(rank, size), 0), step)


@promise("wait-again", *CORE)
def wait_again(stage: Stage, rank: Rank) -> None:
    """Handles of both directions are waited twice, the second time in reverse order."""
    each_way(stage, rank, 1, inline_bytes=0)


@promise("wait-threads", *TALKATIVE)
def wait_threads(stage: Stage, rank: Rank) -> None:
    """Two tasks wait for one send, one of them with a limit."""
    comm = stage.connect(rank)
    if rank.index == 1:
        stage.expect(rank, comm.recv(stage.target(rank), 0), 6)
    else:
        handle = comm.isend(stage.source(rank, 6), 1)
        waiter = rank.spawn(lambda: handle.synchronize(), "second waiter")
        handle.synchronize(timeout=100.0)
        waiter.join()


@promise("timeout-harmless", *CORE)
def timeout_harmless(stage: Stage, rank: Rank) -> None:
    """A receive is waited with a limit before the peer sends, and again afterwards."""
    comm = stage.connect(rank)
    if rank.index == 0:
        rank.sleep(2.0)
        comm.send(stage.source(rank, 4), 1)
    else:
        handle = comm.irecv(stage.target(rank), 0)
        assert expires(handle.synchronize, 1.0), "the wait of a message that was not sent returned"
        stage.expect(rank, handle.result(), 4)


@promise("timeout-transfer", *TALKATIVE, early_ticks=2)
def timeout_transfer(stage: Stage, rank: Rank) -> None:
    """Limits expire at any moment of a transfer: the clock may jump twice."""
    comm = stage.connect(rank)
    if rank.index == 0:
        comm.send(stage.source(rank, 3), 1)
    else:
        handle = comm.irecv(stage.target(rank), 0)
        for _ in range(2):
            expires(handle.synchronize, 1.0)
        stage.expect(rank, handle.result(), 3)


@promise("completed-exact", *BACKGROUND, early_ticks=3)
def completed_exact(stage: Stage, rank: Rank) -> None:
    """A source is overwritten as soon as `is_completed` says so, a result is then used."""
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


@promise("dropped-handle", *CORE)
def dropped_handle(stage: Stage, rank: Rank) -> None:
    """Handles and tensors of two sends are dropped at once."""
    two_dropped(stage, rank)


@promise("alive", "gloo", "adversary")
def alive(stage: Stage, rank: Rank) -> None:
    """Inline, separate and empty sources, and one of a side stream, are dropped at once; all are
    read before their free."""
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


@promise("idle", "gloo", "adversary")
def idle(stage: Stage, rank: Rank) -> None:
    """A receive is pending, and another is being waited for, during an hour of silence."""
    comm = stage.connect(rank)
    if rank.index == 0:
        rank.sleep(_HOUR)
        for tag in (0, 1):
            comm.send(stage.source(rank, tag), 1, tag=tag)
    else:
        pending = comm.irecv(stage.target(rank), 0, tag=1)
        stage.expect(rank, comm.recv(stage.target(rank), 0), 0)
        stage.expect(rank, pending.result(), 1)


def _unwaited(stage: Stage, rank: Rank, reaping: str) -> None:
    comm = stage.connect(rank, reaping=reaping, inline_bytes=0)
    if rank.index == 0:
        for value in (1, 2):
            comm.isend(stage.source(rank, value), 1)
        while comm.ledger.snapshot().sends:
            rank.sleep(0.1)
            comm.ledger.reap()
    else:
        for value in (1, 2):
            stage.expect(rank, comm.recv(stage.target(rank), 0), value)


def _in_order(stage: Stage, rank: Rank) -> None:
    _unwaited(stage, rank, "fifo")


@promise("released", *TALKATIVE, also=(_in_order,))
def released(stage: Stage, rank: Rank) -> None:
    """Under each reaping policy of the core, all is released before it was waited for."""
    _unwaited(stage, rank, "background")


@promise("copy-on-post", *CORE)
def copy_on_post(stage: Stage, rank: Rank) -> None:
    """The source is overwritten right after the post."""
    comm = stage.connect(rank, retention="copy_on_post", inline_bytes=0)
    if rank.index == 0:
        source = stage.source(rank, 1)
        handle = comm.isend(source, 1)
        stage.overwrite(rank, source, 9)
        handle.wait()
    else:
        stage.expect(rank, comm.recv(stage.target(rank), 0), 1)


@promise("bounded", *TALKATIVE)
def bounded(stage: Stage, rank: Rank) -> None:
    """With a bound of one send, two are posted; the second waits for room."""
    two_dropped(stage, rank, max_inflight_ops=1)


@promise("order", *TALKATIVE)
def order(stage: Stage, rank: Rank) -> None:
    """Five outstanding sends each way are received in the order of their posts."""
    each_way(stage, rank, 5, inline_bytes=0)


@promise("unexpected", *TALKATIVE)
def unexpected(stage: Stage, rank: Rank) -> None:
    """Three messages come before anybody asks, who then asks for one a second."""
    comm = stage.connect(rank)
    if rank.index == 0:
        for value in (1, 2, 3):
            comm.isend(stage.source(rank, value), 1)
        comm.drain()
    else:
        for value in (1, 2, 3):
            rank.sleep(1.0)
            stage.expect(rank, comm.recv(stage.target(rank), 0), value)


@promise("tags-independent", *TALKATIVE)
def tags_independent(stage: Stage, rank: Rank) -> None:
    """The message of tag 1 is sent first and asked for last."""
    comm = stage.connect(rank)
    if rank.index == 0:
        comm.isend(stage.source(rank, 1), 1, tag=1)
        comm.isend(stage.source(rank, 2), 1, tag=2)
        comm.drain()
    else:
        for tag in (2, 1):
            stage.expect(rank, comm.recv(stage.target(rank), 0, tag=tag), tag)


@promise("channels-independent", *TALKATIVE)
def channels_independent(stage: Stage, rank: Rank) -> None:
    """A send on `data` waits for a receive that its peer posts only after one on `control`."""
    comm = stage.connect(rank, inline_bytes=0)
    control = comm.channel("control")
    if rank.index == 0:
        comm.isend(stage.source(rank, 1), 1)
        control.isend(stage.source(rank, 2), 1)
        comm.drain()
    else:
        stage.expect(rank, control.recv(stage.target(rank), 0), 2)
        stage.expect(rank, comm.recv(stage.target(rank), 0), 1)


@promise("peers-independent", *TALKATIVE, size=3)
def peers_independent(stage: Stage, rank: Rank) -> None:
    """Three ranks, each sends to the next and receives from the one before."""
    comm = stage.connect(rank)
    send = comm.isend(stage.source(rank, rank.index), (rank.index + 1) % 3)
    before = (rank.index - 1) % 3
    stage.expect(rank, comm.recv(stage.target(rank), before), before)
    send.wait()


@promise("broadcast", *TALKATIVE)
def broadcast(stage: Stage, rank: Rank) -> None:
    """Two broadcasts in flight, each of its own width."""
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


@promise("size-mismatch", "gloo", "adversary")
def size_mismatch(stage: Stage, rank: Rank) -> None:
    """A message of 64 bytes meets a receive of 16; the next receive gets it, then the next one."""
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


@promise("drain", *TALKATIVE)
def drain(stage: Stage, rank: Rank) -> None:
    """After `drain` the handle of the send says complete."""
    comm = stage.connect(rank, inline_bytes=0)
    if rank.index == 0:
        handle = comm.isend(stage.source(rank, 1), 1)
        comm.drain()
        assert handle.is_completed(), "drained, and not complete"
    else:
        rank.sleep(1.0)
        stage.expect(rank, comm.recv(stage.target(rank), 0), 1)


@promise("close", *TALKATIVE)
def close(stage: Stage, rank: Rank) -> None:
    """Both ranks send, receive and close at once."""
    comm, peer = stage.connect(rank), 1 - rank.index
    comm.isend(stage.source(rank, rank.index), peer)
    stage.expect(rank, comm.recv(stage.target(rank), peer), peer)
    stage.settle(rank)
    comm.close(timeout=60.0)
