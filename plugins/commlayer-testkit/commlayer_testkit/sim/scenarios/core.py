"""The library's own communicator on every host transport, beyond its `promises`."""

from __future__ import annotations

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenario import on_ranks, scenario
from commlayer_testkit.sim.scenarios.promises import BACKGROUND, CORE, TALKATIVE, each_way
from commlayer_testkit.sim.stage import Stage


@scenario(*CORE)
@on_ranks(2, Stage)
def core_one_each_way(rank: Rank, stage: Stage) -> None:
    """One tensor each way; every handle is waited twice."""
    each_way(stage, rank, 1)


@scenario(*CORE)
@on_ranks(2, Stage)
def core_two_each_way(rank: Rank, stage: Stage) -> None:
    """Two tensors each way; first in, first out."""
    each_way(stage, rank, 2)


@scenario(*CORE)
@on_ranks(2, Stage)
def core_three_each_way(rank: Rank, stage: Stage) -> None:
    """Three tensors each way."""
    each_way(stage, rank, 3)


@scenario(*BACKGROUND)
@on_ranks(2, Stage)
def core_reports(rank: Rank, stage: Stage) -> None:
    """Three tasks of each rank ask what the other rank waits for; every one is answered."""
    comm = stage.connect(rank)

    def ask() -> None:
        report = comm.report(timeout=100.0)
        assert report.silent == (), f"no answer from {report.silent}"

    others = [rank.spawn(ask, f"asker {number}") for number in (1, 2)]
    ask()
    for other in others:
        other.join()


@scenario(*TALKATIVE)
@on_ranks(2, Stage)
def core_bound_raises(rank: Rank, stage: Stage) -> None:
    """At the bound with ``on_full = "raise"`` the send is refused and nothing is left behind."""
    comm = stage.connect(
        rank, max_inflight_ops=1, on_full="raise", inline_bytes=0, unclaimed_messages=1
    )
    if rank.index == 1:
        rank.sleep(1.0)
        assert int(comm.recv(stage.target(rank, 64), 0)[0]) == 1
        return
    comm.isend(stage.source(rank, 1, 64), 1)
    # No helper catches it: the error's frames would keep the source until a collection.
    try:
        comm.isend(stage.source(rank, 2, 64), 1)
    except CommError as error:
        if error.kind is not ErrorKind.FULL:
            raise
    else:
        raise AssertionError("a send beyond the bound was admitted")
    comm.drain()


@scenario(*BACKGROUND)
@on_ranks(2, Stage)
def core_sent_then_closed(rank: Rank, stage: Stage) -> None:
    """One rank sends on two tags and closes at once; the other asks later and gets both."""
    comm, peer = stage.connect(rank), 1 - rank.index
    if rank.index == 0:
        comm.isend(stage.source(rank, 3), peer)
        comm.isend(stage.source(rank, 4), peer, tag=1)
        comm.close(timeout=60.0)
    else:
        assert int(comm.recv(stage.target(rank, 16), peer)[0]) == 3
        assert int(comm.recv(stage.target(rank, 16), peer, tag=1)[0]) == 4


@scenario(*CORE)
@on_ranks(2, Stage)
def core_both_close(rank: Rank, stage: Stage) -> None:
    """Both close while nobody receives, small and large; a close names what it left behind."""
    comm, peer = stage.connect(rank, inline_bytes=0), 1 - rank.index
    sends = [
        comm.isend(stage.source(rank, rank.index, nbytes), peer, tag=tag)
        for tag, nbytes in enumerate((16, 1 << 13))
    ]
    ending = ""
    try:
        comm.close(timeout=0.2)
    except CommError as error:
        ending = str(error)
    undelivered = [send for send in sends if send.exception() is not None]
    assert not undelivered or "isend to rank" in ending, f"the close says {ending!r}"
