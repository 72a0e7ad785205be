"""Commlayer on the ranks of existing torch groups, two communicators a rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks

import commlayer
from commlayer import CommError, ErrorKind

LARGE = 1 << 16
CONFIG = {"backend": "gloo", "connect_timeout": 20.0}


def tp2_pp2() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp_ranks = [rank // 2 * 2, rank // 2 * 2 + 1]
    pp_ranks = [rank % 2, rank % 2 + 2]
    groups = {
        name: dist.new_group(members, use_local_synchronization=True)
        for name, members in (("tp", tp_ranks), ("pp", pp_ranks))
    }
    # Stage 0 connects its groups in the other order than stage 1.
    comms = {
        name: commlayer.connect(CONFIG, group=groups[name])
        for name in (groups if rank < 2 else reversed(groups))
    }
    tp, pp = comms["tp"], comms["pp"]
    assert (tp.rank, tp.world_size) == (tp_ranks.index(rank), 2)
    assert (pp.rank, pp.world_size) == (pp_ranks.index(rank), 2)
    sends = [
        tp.isend(torch.full((LARGE,), float(rank)), 1 - tp.rank),
        pp.isend(torch.full((LARGE,), float(rank)), 1 - pp.rank),
    ]
    assert pp.recv(None, 1 - pp.rank)[0] == pp_ranks[1 - pp.rank]
    assert tp.recv(None, 1 - tp.rank)[0] == tp_ranks[1 - tp.rank]
    for send in sends:
        send.wait(20)
    assert tp.broadcast_object(rank, 0) == tp_ranks[0]
    assert pp.broadcast_object(rank, 1) == pp_ranks[1]
    total = torch.tensor([rank])
    dist.all_reduce(total)
    assert total.item() == 6
    pp.close()
    assert tp.broadcast_object(rank, 1) == tp_ranks[1]
    tp.close()
    dist.destroy_process_group()


def test_tp2_pp2_with_groups_connected_in_another_order(ranks: Ranks) -> None:
    ranks.run(tp2_pp2, 4)


def members_only() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    members = [2, 1]
    group = dist.new_group(members)
    if rank in members:
        comm = commlayer.connect(CONFIG, group=group)
        assert comm.world_size == 2
        others = comm.broadcast_object(rank, 0), comm.broadcast_object(rank, 1)
        assert sorted(others) == [1, 2]
        comm.close()
    else:
        with pytest.raises(CommError) as caught:
            commlayer.connect(CONFIG, group=group)
        assert caught.value.kind is ErrorKind.CONFIG
    whole = commlayer.connect(CONFIG)
    assert (whole.rank, whole.world_size) == (rank, 3)
    assert whole.broadcast_object(rank, 2) == 2
    whole.close()
    dist.destroy_process_group()


def test_only_members_of_a_group_connect(ranks: Ranks) -> None:
    ranks.run(members_only, 3)


def two_by_name() -> None:
    names = ["target", "draft"]
    comms = {}
    for name in names:
        comms[name] = here.connect(name=name)
    peer = 1 - comms["target"].rank
    for name in names:
        comms[name].isend_object(name, peer)
    for name in reversed(names):
        assert comms[name].recv_object(peer) == name
    for name in names if peer else reversed(names):
        comms[name].close()


def test_two_communicators_by_name_closed_in_another_order(ranks: Ranks) -> None:
    ranks.run(two_by_name, 2)


def leaves_two_open() -> None:
    comms = [here.connect(name=name) for name in ("target", "draft")]
    peer = 1 - comms[0].rank
    for comm in comms:
        comm.isend(torch.ones(LARGE), peer)
        comm.irecv(None, peer)
        comm.irecv_object(peer)
    comms[peer].close()


def test_two_communicators_each_closed_by_one_rank_and_left_open_by_the_other(
    ranks: Ranks,
) -> None:
    processes = ranks.spawn(leaves_two_open, 2)
    assert [process.wait() for process in processes] == [0, 0], processes[0].output
