"""The library's own communicator on every host transport: its promises under all schedules.

The transport itself reports early release (memory read after its free), overwrites,
lost messages and misuse; the scenarios check order, bounds, and that nothing is
retained at quiescence.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.sim.mount_core import connect
from commlayer.sim.rank import Rank, blank, filled
from commlayer.sim.scenario import scenario
from commlayer.sim.world import World

CORE = (
    "gloo", "gloo_early_poll", "mpi", "mpi_rendezvous", "adversary", "adversary_serial",
    "adversary_polled",
)  # fmt: skip
BACKGROUND = tuple(name for name in CORE if name != "adversary_polled")
"""Messages move though no rank calls anything."""
TALKATIVE = ("gloo", "adversary", "adversary_serial")


class Promises:
    """What must hold of every rank's communicator at quiescence."""

    def __init__(self, world: World, *, operations: int = 8, nbytes: int = 1 << 20) -> None:
        self.world = world
        self.operations = operations
        self.nbytes = nbytes
        self._communicators: list[Communicator] = []
        self._sources: list[weakref.ref[Any]] = []
        world.at_end(self._check)

    def connect(self, rank: Rank, **config: Any) -> Communicator:
        communicator = connect(
            rank, max_inflight_ops=self.operations, max_inflight_bytes=self.nbytes, **config
        )
        self._communicators.append(communicator)
        return communicator

    def source(self, value: int, nbytes: int = 16) -> torch.Tensor:
        """A tensor that must be freed by the time the world is quiet."""
        tensor = filled(value, nbytes)
        self._sources.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def _check(self) -> None:
        for communicator in self._communicators:
            snapshot = communicator.ledger.snapshot()
            rank = communicator.rank
            assert snapshot.sends == 0, f"rank {rank} still counts {snapshot.sends} sends"
            assert snapshot.bytes == 0, f"rank {rank} still retains {snapshot.bytes} bytes"
            assert snapshot.peak_sends <= self.operations, f"rank {rank} exceeded the bound"
            assert snapshot.peak_bytes <= self.nbytes, f"rank {rank} exceeded the bound in bytes"
        alive = sum(source() is not None for source in self._sources)
        assert alive == 0, f"{alive} source tensors are still alive"


def _each_way(world: World, count: int, **config: Any) -> None:
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank, **config), 1 - rank.index
        recvs = [comm.irecv(blank(16), peer) for _ in range(count)]
        sends = [comm.isend(promises.source(10 * rank.index + n), peer) for n in range(count)]
        values = [int(handle.result()[0]) for handle in recvs]
        assert values == [10 * peer + n for n in range(count)], values
        for handle in sends:
            handle.wait()
            handle.wait()
            assert handle.is_completed()

    world.start(2, body)


@scenario(*CORE)
def core_one_each_way(world: World) -> None:
    """One tensor each way; every handle waited, sends twice."""
    _each_way(world, 1)


@scenario(*CORE)
def core_two_each_way(world: World) -> None:
    """Two tensors each way; first in, first out."""
    _each_way(world, 2)


@scenario(*CORE)
def core_three_each_way(world: World) -> None:
    """Three tensors each way."""
    _each_way(world, 3)


@scenario(*CORE, case="C28")
def core_payload_beside_header(world: World) -> None:
    """Nothing is inline: the payload is a message of its own behind the header."""
    _each_way(world, 1, inline_bytes=0)


@scenario(*CORE, case="C23")
def core_dropped(world: World) -> None:
    """Handles and tensors are dropped at once; every message arrives, in order."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            for value in (1, 2):
                comm.isend(promises.source(value), 1)
            comm.drain()
        else:
            for value in (1, 2):
                assert int(comm.recv(blank(16), 0)[0]) == value

    world.start(2, body)


@scenario(*TALKATIVE, case="C34")
def core_backlog(world: World) -> None:
    """Messages that arrive before anybody asks for them are handed out first in, first out."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            for value in (1, 2, 3):
                comm.isend(promises.source(value), 1)
            comm.drain()
        else:
            for value in (1, 2, 3):
                assert int(comm.recv(blank(16), 0)[0]) == value
                rank.sleep(1.0)

    world.start(2, body)


@scenario(*CORE, case="C1")
def core_opposite_dicts(world: World) -> None:
    """Both ranks post a dict send first, then receive; no call blocks."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank), 1 - rank.index
        send = comm.isend_tensor_dict({"hidden": promises.source(rank.index), "step": 3}, peer)
        got = comm.irecv_tensor_dict(peer).result()
        assert got["step"] == 3
        assert int(got["hidden"][0]) == peer
        send.wait()

    world.start(2, body)


@scenario(*CORE, case="C2")
def core_overwrite_after_wait(world: World) -> None:
    """After `wait` the source, which is sent without a copy, may be overwritten."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, inline_bytes=0)
        if rank.index == 0:
            hidden = promises.source(1)
            for step in (1, 2):
                hidden.fill_(step)
                comm.isend(hidden, 1).wait()
        else:
            for step in (1, 2):
                assert int(comm.recv(blank(16), 0)[0]) == step

    world.start(2, body)


@scenario(*CORE, case="C2")
def core_copy_on_post(world: World) -> None:
    """With `copy_on_post` the source may be overwritten at once."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, retention="copy_on_post", inline_bytes=0)
        if rank.index == 0:
            hidden = promises.source(1)
            handle = comm.isend(hidden, 1)
            hidden.fill_(9)
            handle.wait()
        else:
            assert int(comm.recv(blank(16), 0)[0]) == 1

    world.start(2, body)


@scenario(*BACKGROUND, case="C16")
def core_completes_unwaited(world: World) -> None:
    """`is_completed` turns true though nobody waits, and not before the peer has posted."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, inline_bytes=0)
        if rank.index == 0:
            handle = comm.isend(promises.source(5, 64), 1, tag=1)
            while not handle.is_completed():
                rank.sleep(0.1)
        else:
            assert int(comm.recv(blank(64), 0, tag=1)[0]) == 5

    world.start(2, body)


@scenario(*CORE, case="C10")
def core_timeout_changes_nothing(world: World) -> None:
    """A wait whose limit expires raises; the operation goes on and the next wait succeeds."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            rank.sleep(2.0)
            comm.send(promises.source(4), 1)
            return
        handle = comm.irecv(blank(16), 0)
        try:
            handle.wait(timeout=1.0)
        except CommTimeout:
            pass
        else:
            raise AssertionError("the wait of a message that was not sent returned")
        assert int(handle.result()[0]) == 4

    world.start(2, body)


@scenario(*TALKATIVE, case="C30")
def core_two_waiters(world: World) -> None:
    """Two tasks wait for one handle, one of them with a limit."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 1:
            assert int(comm.recv(blank(16), 0)[0]) == 6
            return
        handle = comm.isend(promises.source(6), 1)
        waiter = rank.spawn(lambda: handle.wait(), "second waiter")
        handle.wait(timeout=100.0)
        waiter.join()

    world.start(2, body)


@scenario(*TALKATIVE, case="C31")
def core_bound(world: World) -> None:
    """At the bound of one send in flight the next waits for room, and gets it."""
    promises = Promises(world, operations=1)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            for value in (1, 2):
                comm.isend(promises.source(value), 1)
            comm.drain()
        else:
            for value in (1, 2):
                assert int(comm.recv(blank(16), 0)[0]) == value

    world.start(2, body)


@scenario(*TALKATIVE, case="C31")
def core_bound_raises(world: World) -> None:
    """At the bound with ``on_full = "raise"`` the send is refused and nothing is left behind."""
    promises = Promises(world, operations=1)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank, on_full="raise", inline_bytes=0, unclaimed_messages=1)
        if rank.index == 1:
            rank.sleep(1.0)
            assert int(comm.recv(blank(64), 0)[0]) == 1
            return
        comm.isend(promises.source(1, 64), 1)
        try:
            comm.isend(promises.source(2, 64), 1)
        except CommError as error:
            if error.kind is not ErrorKind.FULL:
                raise
        else:
            raise AssertionError("a send beyond the bound was admitted")
        comm.drain()

    world.start(2, body)


@scenario(*TALKATIVE, case="C34")
def core_unclaimed_tag(world: World) -> None:
    """A message of one tag that nobody asks for does not hide another tag's."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            comm.isend(promises.source(1), 1, tag=1)
            comm.send(promises.source(2), 1, tag=2)
            comm.drain()
        else:
            assert int(comm.recv(blank(16), 0, tag=2)[0]) == 2
            assert int(comm.recv(blank(16), 0, tag=1)[0]) == 1

    world.start(2, body)


@scenario(*TALKATIVE, case="C26")
def core_ring_of_three(world: World) -> None:
    """Three ranks, each sends to the next and receives from the one before."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        send = comm.isend(promises.source(rank.index), (rank.index + 1) % 3)
        before = (rank.index - 1) % 3
        assert int(comm.recv(blank(16), before)[0]) == before
        send.wait()

    world.start(3, body)


@scenario(*TALKATIVE, case="C29")
def core_drain(world: World) -> None:
    """A drain returns when every send is locally complete, and not before."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            handle = comm.isend(promises.source(1), 1)
            comm.drain()
            assert handle.is_completed()
        else:
            assert int(comm.recv(blank(16), 0)[0]) == 1

    world.start(2, body)


@scenario(*TALKATIVE, case="C10", early_ticks=2)
def core_timeout_during_transfer(world: World) -> None:
    """A limit expires while the message is under way: the clock may jump at any moment."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        if rank.index == 0:
            comm.send(promises.source(3), 1)
            return
        handle = comm.irecv(blank(16), 0)
        for limit in (1.0, 1.0):
            try:
                handle.wait(timeout=limit)
            except CommTimeout:
                pass
        assert int(handle.result()[0]) == 3

    world.start(2, body)


@scenario(*TALKATIVE, case="C29")
def core_close(world: World) -> None:
    """Both ranks close after an exchange; close drains, parts, and ends every lane."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank), 1 - rank.index
        comm.isend(promises.source(rank.index), peer)
        assert int(comm.recv(blank(16), peer)[0]) == peer
        comm.close(timeout=60.0)

    world.start(2, body)


@scenario(*BACKGROUND, case="C29")
def core_sent_then_closed(world: World) -> None:
    """One rank sends on two tags and closes at once; the other asks later and gets both."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank), 1 - rank.index
        if rank.index == 0:
            comm.isend(promises.source(3), peer)
            comm.isend(promises.source(4), peer, tag=1)
            comm.close(timeout=60.0)
        else:
            assert int(comm.recv(blank(16), peer)[0]) == 3
            assert int(comm.recv(blank(16), peer, tag=1)[0]) == 4

    world.start(2, body)


@scenario(*CORE, case="C29")
def core_both_close(world: World) -> None:
    """Both close while nobody receives, small and large; a close names what it left behind."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm, peer = promises.connect(rank, inline_bytes=0), 1 - rank.index
        sends = [
            comm.isend(promises.source(rank.index, nbytes), peer, tag=tag)
            for tag, nbytes in enumerate((16, 1 << 13))
        ]
        ending = ""
        try:
            comm.close(timeout=0.2)
        except CommError as error:
            ending = str(error)
        undelivered = [send for send in sends if send.exception() is not None]
        assert not undelivered or "isend to rank" in ending, f"the close says {ending!r}"

    world.start(2, body)


@scenario(*TALKATIVE, case="C4")
def core_broadcasts_back_to_back(world: World) -> None:
    """Two broadcasts in flight, each with its own width; every rank sees both."""
    promises = Promises(world)

    def body(rank: Rank) -> None:
        comm = promises.connect(rank)
        sizes = (8, 24)
        handles = []
        for step, size in enumerate(sizes):
            tensor = promises.source(step, size) if rank.index == 0 else None
            handles.append(comm.broadcast(tensor, 0, async_op=True))
            del tensor
        for step, size in enumerate(sizes):
            result = handles.pop(0).result()
            assert result.numel() == size
            assert int(result[0]) == step
            del result

    world.start(2, body)
