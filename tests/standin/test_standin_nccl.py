"""torch's own ProcessGroupNCCL between two and three processes."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from devices.groups import QUIET, group, swap, until
from devices.tensors import full, take_device, value
from ranks import here
from ranks.pool import Ranks, collect
from standin import controls

THREE = {"STANDIN_DEVICES": "3"}


def one_message() -> tuple[bool, int, int]:
    take_device()
    pg = group()
    # The first operation makes the communicator, for which both ranks are needed.
    swap(pg, 1 - here.rank(), full(1), full(0))
    tensor = full(7 if here.rank() == 0 else 0)
    if here.rank() == 0:
        work = pg.send([tensor], 1, 0)
        early = work.is_completed()
        here.meet("looked at")
    else:
        here.meet("looked at")
        work = pg.recv([tensor], 0, 0)
        early = False
    work.wait()  # orders the current stream
    seen = value(tensor)
    torch.cuda.synchronize()
    assert until(work.is_completed)
    pg.shutdown()
    return early, seen, len(controls.contexts())


def test_a_send_is_complete_once_it_is_received_and_each_rank_has_one_context(ranks: Ranks) -> None:
    assert ranks.run(one_message, 2, timeout=60) == [(False, 7, 1)] * 2


def order_by_wait() -> int:
    take_device()
    pg = group()
    tensor = full(0)
    if here.rank() == 0:
        torch.cuda._sleep(300_000_000)
        tensor.fill_(8)  # on the current stream, which the send comes after
        pg.send([tensor], 1, 0).wait()
        tensor.fill_(9)  # comes after the send
        torch.cuda.synchronize()
        return 8
    pg.recv([tensor], 0, 0).wait()
    return value(tensor)


def test_operations_are_ordered_with_the_current_stream(ranks: Ranks) -> None:
    assert ranks.run(order_by_wait, 2, timeout=60) == [8, 8]


def opposite_sends() -> tuple[bool, int]:
    take_device()
    pg, peer = group(), 1 - here.rank()
    out, into = full(here.rank() + 1), full(0)
    swap(pg, peer, out, into)
    send = pg.send([out], peer, 0)
    here.meet("both have posted a send")
    receive = pg.recv([into], peer, 0)
    stuck = not until(lambda: send.is_completed() or receive.is_completed(), 0.5)
    here.meet("looked at")
    pg.abort()
    return stuck, value(into)


def test_opposite_sends_of_one_communicator_hold_each_other_up_until_an_abort(ranks: Ranks) -> None:
    assert ranks.run(opposite_sends, 2, timeout=60) == [(True, 2), (True, 1)]


def ring() -> int:
    device = take_device()
    dist.init_process_group("nccl", store=here.store(), rank=here.rank(), world_size=3)
    after, before = (here.rank() + 1) % 3, (here.rank() + 2) % 3
    out, into = full(here.rank() + 1), full(0)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, after), dist.P2POp(dist.irecv, into, before)]
    ):
        work.wait()
    seen = value(into)
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()
    return seen


def test_three_ranks_send_around_in_one_group_of_operations(ranks: Ranks) -> None:
    assert ranks.run(ring, 3, timeout=90, environment=THREE) == [3, 1, 2]


def pairs_of_three() -> list[int]:
    take_device()
    pg = group()
    others = [rank for rank in range(3) if rank != here.rank()]
    out = full(here.rank() + 1)
    into = {rank: full(0) for rank in others}
    for low, high in ((0, 1), (1, 2), (0, 2)):
        if here.rank() == low:
            pg.send([out], high, 0).wait()
            pg.recv([into[high]], high, 0).wait()
        elif here.rank() == high:
            pg.recv([into[low]], low, 0).wait()
            pg.send([out], low, 0).wait()
    seen = [value(into[rank]) for rank in others]
    pg.shutdown()
    return seen


def test_each_pair_of_three_ranks_talks_both_ways(ranks: Ranks) -> None:
    assert ranks.run(pairs_of_three, 3, timeout=90, environment=THREE) == [[2, 3], [1, 3], [1, 2]]


def collectives() -> tuple[int, list[float], list[int]]:
    take_device()
    dist.init_process_group("nccl", store=here.store(), rank=here.rank(), world_size=3)
    token = full(99 if here.rank() == 1 else 0)
    dist.broadcast(token, 1)
    sums = torch.full((5,), here.rank() + 0.5, device="cuda")
    dist.all_reduce(sums)
    parts = [full(0) for _ in range(3)]
    dist.all_gather(parts, full(here.rank() + 1))
    seen = value(token), sums.cpu().tolist(), [value(part) for part in parts]
    dist.destroy_process_group()
    return seen


def test_broadcast_sum_and_gather_of_three_ranks(ranks: Ranks) -> None:
    assert (
        ranks.run(collectives, 3, timeout=90, environment=THREE) == [(99, [4.5] * 5, [1, 2, 3])] * 3
    )


def remote_error() -> tuple[bool, str]:
    take_device()
    pg, peer = group(), 1 - here.rank()
    swap(pg, peer, full(1), full(0))
    here.meet("connected")
    if here.rank() == 1:
        here.meet("looked at")
        pg.abort()
        return True, ""
    work = pg.recv([full(0)], 1, 0)
    controls.break_communicators()
    # A work asks the communicator when it is polled: it is then complete, and has an exception.
    told = until(work.is_completed) and work.exception() is not None
    here.meet("looked at")
    until(lambda: "SUCCESS" not in str(pg.get_error()))  # the watchdog tells the group
    error = str(pg.get_error())
    pg.abort()
    return told, error


def test_an_asynchronous_error_reaches_the_group(ranks: Ranks) -> None:
    told, error = ranks.run(remote_error, 2, timeout=60, environment=QUIET)[0]
    assert told
    assert "COMM_ERROR" in error


def loses_its_peer() -> tuple[bool, str]:
    take_device()
    pg, peer = group(), 1 - here.rank()
    swap(pg, peer, full(1), full(0))
    here.say("connected")
    if here.rank() == 1:
        here.hear()
    work = pg.recv([full(0)], 1, 0)
    here.hear()  # the peer is dead
    finished = until(work.is_completed, 0.5)
    until(lambda: "SUCCESS" not in str(pg.get_error()), 5)
    error = str(pg.get_error())
    pg.abort()
    torch.cuda.synchronize()  # the abort ended the kernel
    return finished, error


def run_loss(ranks: Ranks, environment: dict[str, str]) -> tuple[bool, str]:
    survivor, victim = ranks.spawn(loses_its_peer, 2, environment=environment)
    survivor.hear(60)
    victim.hear(60)
    victim.signal(signal.SIGKILL)
    victim.wait(30)
    survivor.say("dead")
    (result,) = collect([survivor], 60)
    return result  # type: ignore[no-any-return]


def test_a_dead_peer_leaves_the_kernel_running_until_an_abort(ranks: Ranks) -> None:
    finished, error = run_loss(ranks, QUIET)
    assert not finished
    assert "SUCCESS" in error


def sizes_differ() -> bool:
    take_device()
    pg = group()
    tensor = full(0, 1000 + here.rank())
    work = pg.send([tensor], 1, 0) if here.rank() == 0 else pg.recv([tensor], 0, 0)
    seen = until(lambda: "SUCCESS" not in str(pg.get_error()), 10) if here.rank() else True
    here.meet("looked at")
    del work
    pg.abort()
    return seen


def test_a_receive_of_another_size_is_said(ranks: Ranks) -> None:
    processes = ranks.spawn(sizes_differ, 2, environment=QUIET)
    assert collect(processes, 60) == [True, True]
    assert "differ in size" in processes[1].output
