"""The library's own communicator on every host transport: its promises under all schedules.

The transport itself reports early release (memory read after its free), overwrites,
lost messages and misuse; the scenarios check order, bounds, and that nothing is
retained at quiescence.
"""

from __future__ import annotations

from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer_testkit.sim.leftovers import BOUNDS, Leftovers
from commlayer_testkit.sim.mount_core import connect
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario
from commlayer_testkit.sim.world import World

CORE = (
    "gloo", "gloo_early_poll", "mpi", "mpi_rendezvous", "adversary", "adversary_serial",
    "adversary_polled",
)  # fmt: skip
BACKGROUND = tuple(name for name in CORE if name != "adversary_polled")
"""Messages move though no rank calls anything."""
TALKATIVE = ("gloo", "adversary", "adversary_serial")


class Promises:
    """Connects ranks, of which nothing may be left at quiescence."""

    def __init__(self, world: World) -> None:
        self._leftovers = Leftovers(world)

    def connect(self, rank: Rank, **config: Any) -> Communicator:
        """Connect a rank, with small bounds unless `config` says otherwise."""
        return self._leftovers.communicator(connect(rank, **{**BOUNDS, **config}))

    def source(self, value: int, nbytes: int = 16) -> torch.Tensor:
        """A tensor that must be freed by the time the world is quiet."""
        return self._leftovers.source(filled(value, nbytes))


def _each_way(rank: Rank, promises: Promises, count: int, **config: Any) -> None:
    comm, peer = promises.connect(rank, **config), 1 - rank.index
    recvs = [comm.irecv(blank(16), peer) for _ in range(count)]
    sends = [comm.isend(promises.source(10 * rank.index + n), peer) for n in range(count)]
    values = [int(handle.result()[0]) for handle in recvs]
    assert values == [10 * peer + n for n in range(count)], values
    for handle in sends:
        handle.wait()
        handle.wait()
        assert handle.is_completed()


@scenario(*CORE)
@on_ranks(2, Promises)
def core_one_each_way(rank: Rank, promises: Promises) -> None:
    """One tensor each way; every handle waited, sends twice."""
    _each_way(rank, promises, 1)


@scenario(*CORE)
@on_ranks(2, Promises)
def core_two_each_way(rank: Rank, promises: Promises) -> None:
    """Two tensors each way; first in, first out."""
    _each_way(rank, promises, 2)


@scenario(*CORE)
@on_ranks(2, Promises)
def core_three_each_way(rank: Rank, promises: Promises) -> None:
    """Three tensors each way."""
    _each_way(rank, promises, 3)


@scenario(*CORE)
@on_ranks(2, Promises)
def core_payload_beside_header(rank: Rank, promises: Promises) -> None:
    """Nothing is inline: the payload is a message of its own behind the header."""
    _each_way(rank, promises, 1, inline_bytes=0)


def _one_way(rank: Rank, promises: Promises, **config: Any) -> None:
    comm = promises.connect(rank, **config)
    if rank.index == 0:
        for value in (1, 2):
            comm.isend(promises.source(value), 1)
        comm.drain()
    else:
        for value in (1, 2):
            assert int(comm.recv(blank(16), 0)[0]) == value


@scenario(*CORE)
@on_ranks(2, Promises)
def core_dropped(rank: Rank, promises: Promises) -> None:
    """Handles and tensors are dropped at once; every message arrives, in order."""
    _one_way(rank, promises)


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_backlog(rank: Rank, promises: Promises) -> None:
    """Messages that arrive before anybody asks for them are handed out first in, first out."""
    comm = promises.connect(rank)
    if rank.index == 0:
        for value in (1, 2, 3):
            comm.isend(promises.source(value), 1)
        comm.drain()
    else:
        for value in (1, 2, 3):
            assert int(comm.recv(blank(16), 0)[0]) == value
            rank.sleep(1.0)


@scenario(*CORE)
@on_ranks(2, Promises)
def core_opposite_dicts(rank: Rank, promises: Promises) -> None:
    """Both ranks post a dict send first, then receive; no call blocks."""
    comm, peer = promises.connect(rank), 1 - rank.index
    send = comm.isend_tensor_dict({"hidden": promises.source(rank.index), "step": 3}, peer)
    got = comm.irecv_tensor_dict(peer).result()
    assert got["step"] == 3
    assert int(got["hidden"][0]) == peer
    send.wait()


@scenario(*CORE)
@on_ranks(2, Promises)
def core_overwrite_after_wait(rank: Rank, promises: Promises) -> None:
    """After `wait` the source, which is sent without a copy, may be overwritten."""
    comm = promises.connect(rank, inline_bytes=0)
    if rank.index == 0:
        hidden = promises.source(1)
        for step in (1, 2):
            hidden.fill_(step)
            comm.isend(hidden, 1).wait()
    else:
        for step in (1, 2):
            assert int(comm.recv(blank(16), 0)[0]) == step


@scenario(*CORE)
@on_ranks(2, Promises)
def core_copy_on_post(rank: Rank, promises: Promises) -> None:
    """With `copy_on_post` the source may be overwritten at once."""
    comm = promises.connect(rank, retention="copy_on_post", inline_bytes=0)
    if rank.index == 0:
        hidden = promises.source(1)
        handle = comm.isend(hidden, 1)
        hidden.fill_(9)
        handle.wait()
    else:
        assert int(comm.recv(blank(16), 0)[0]) == 1


@scenario(*BACKGROUND)
@on_ranks(2, Promises)
def core_completes_unwaited(rank: Rank, promises: Promises) -> None:
    """`is_completed` turns true though nobody waits, and not before the peer has posted."""
    comm = promises.connect(rank, inline_bytes=0)
    if rank.index == 0:
        handle = comm.isend(promises.source(5, 64), 1, tag=1)
        while not handle.is_completed():
            rank.sleep(0.1)
    else:
        assert int(comm.recv(blank(64), 0, tag=1)[0]) == 5


@scenario(*CORE)
@on_ranks(2, Promises)
def core_timeout_changes_nothing(rank: Rank, promises: Promises) -> None:
    """A wait whose limit expires raises; the operation goes on and the next wait succeeds."""
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


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_two_waiters(rank: Rank, promises: Promises) -> None:
    """Two tasks wait for one handle, one of them with a limit."""
    comm = promises.connect(rank)
    if rank.index == 1:
        assert int(comm.recv(blank(16), 0)[0]) == 6
        return
    handle = comm.isend(promises.source(6), 1)
    waiter = rank.spawn(lambda: handle.wait(), "second waiter")
    handle.wait(timeout=100.0)
    waiter.join()


@scenario(*BACKGROUND)
@on_ranks(2, Promises)
def core_reports(rank: Rank, promises: Promises) -> None:
    """Three tasks of each rank ask what the other rank waits for; every one is answered."""
    comm = promises.connect(rank)

    def ask() -> None:
        report = comm.report(timeout=100.0)
        assert report.silent == (), f"no answer from {report.silent}"

    others = [rank.spawn(ask, f"asker {number}") for number in (1, 2)]
    ask()
    for other in others:
        other.join()


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_bound(rank: Rank, promises: Promises) -> None:
    """At the bound of one send in flight the next waits for room, and gets it."""
    _one_way(rank, promises, max_inflight_ops=1)


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_bound_raises(rank: Rank, promises: Promises) -> None:
    """At the bound with ``on_full = "raise"`` the send is refused and nothing is left behind."""
    comm = promises.connect(
        rank, max_inflight_ops=1, on_full="raise", inline_bytes=0, unclaimed_messages=1
    )
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


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_unclaimed_tag(rank: Rank, promises: Promises) -> None:
    """A message of one tag that nobody asks for does not hide another tag's."""
    comm = promises.connect(rank)
    if rank.index == 0:
        comm.isend(promises.source(1), 1, tag=1)
        comm.send(promises.source(2), 1, tag=2)
        comm.drain()
    else:
        assert int(comm.recv(blank(16), 0, tag=2)[0]) == 2
        assert int(comm.recv(blank(16), 0, tag=1)[0]) == 1


@scenario(*TALKATIVE)
@on_ranks(3, Promises)
def core_ring_of_three(rank: Rank, promises: Promises) -> None:
    """Three ranks, each sends to the next and receives from the one before."""
    comm = promises.connect(rank)
    send = comm.isend(promises.source(rank.index), (rank.index + 1) % 3)
    before = (rank.index - 1) % 3
    assert int(comm.recv(blank(16), before)[0]) == before
    send.wait()


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_drain(rank: Rank, promises: Promises) -> None:
    """A drain returns when every send is locally complete, and not before."""
    comm = promises.connect(rank)
    if rank.index == 0:
        handle = comm.isend(promises.source(1), 1)
        comm.drain()
        assert handle.is_completed()
    else:
        assert int(comm.recv(blank(16), 0)[0]) == 1


@scenario(*TALKATIVE, early_ticks=2)
@on_ranks(2, Promises)
def core_timeout_during_transfer(rank: Rank, promises: Promises) -> None:
    """A limit expires while the message is under way: the clock may jump at any moment."""
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


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_close(rank: Rank, promises: Promises) -> None:
    """Both ranks close after an exchange; close drains, parts, and ends every lane."""
    comm, peer = promises.connect(rank), 1 - rank.index
    comm.isend(promises.source(rank.index), peer)
    assert int(comm.recv(blank(16), peer)[0]) == peer
    comm.close(timeout=60.0)


@scenario(*BACKGROUND)
@on_ranks(2, Promises)
def core_sent_then_closed(rank: Rank, promises: Promises) -> None:
    """One rank sends on two tags and closes at once; the other asks later and gets both."""
    comm, peer = promises.connect(rank), 1 - rank.index
    if rank.index == 0:
        comm.isend(promises.source(3), peer)
        comm.isend(promises.source(4), peer, tag=1)
        comm.close(timeout=60.0)
    else:
        assert int(comm.recv(blank(16), peer)[0]) == 3
        assert int(comm.recv(blank(16), peer, tag=1)[0]) == 4


@scenario(*CORE)
@on_ranks(2, Promises)
def core_both_close(rank: Rank, promises: Promises) -> None:
    """Both close while nobody receives, small and large; a close names what it left behind."""
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


@scenario(*TALKATIVE)
@on_ranks(2, Promises)
def core_broadcasts_back_to_back(rank: Rank, promises: Promises) -> None:
    """Two broadcasts in flight, each with its own width; every rank sees both."""
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
