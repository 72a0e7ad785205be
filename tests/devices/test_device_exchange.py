"""What is sent between two devices arrives, in order with the streams of both sides."""

from __future__ import annotations

from threading import Thread

import torch
from devices.groups import until
from devices.pair import connect, swap
from devices.tensors import full, held, value
from ranks import here
from ranks.pool import Ranks


def both_send_first() -> tuple[int, int, int, str]:
    comm = connect()
    peer = 1 - comm.rank
    handle = comm.isend_tensor_dict(
        {"x": full(10 + comm.rank), "step": 3, "y": full(20 + comm.rank, 4096)}, peer
    )
    here.meet("both have sent")
    got = comm.recv_tensor_dict(peer)
    handle.synchronize()
    seen = value(got["x"]), value(got["y"]), got["step"], got["x"].device.type
    comm.close()
    return seen


def test_two_ranks_that_send_first_both_receive(ranks: Ranks) -> None:
    assert ranks.run(both_send_first, 2, timeout=60) == [
        (11, 21, 3, "cuda"),
        (10, 20, 3, "cuda"),
    ]


def behind_a_busy_stream() -> tuple[bool, int]:
    comm = connect()
    swap(comm)
    if comm.rank == 0:
        stream = torch.cuda.current_stream()
        tensor = full(0)
        with held(stream):
            tensor.fill_(7)
            handle = comm.isend(tensor, 1)
            early = handle.is_completed()
            handle.wait()
            tensor.fill_(9)  # comes after the send
        handle.synchronize()
        comm.close()
        return early, 7
    into = full(0)
    comm.irecv(into, 0).wait()
    seen = value(into)
    comm.close()
    return False, seen


def test_a_send_follows_what_its_stream_was_given_and_what_comes_later_follows_it(
    ranks: Ranks,
) -> None:
    assert ranks.run(behind_a_busy_stream, 2, timeout=60) == [(False, 7)] * 2


def on_two_streams() -> list[int]:
    comm = connect()
    if comm.rank == 0:
        comm.send(full(7), 1)
        comm.close()
        return [7, 7]
    handle = comm.irecv(full(0), 0)
    copies = []
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            handle.wait()
            copies.append(handle.result().clone())
    torch.cuda.synchronize()
    seen = [value(copy) for copy in copies]
    comm.close()
    return seen


def test_two_streams_wait_for_one_receive(ranks: Ranks) -> None:
    assert ranks.run(on_two_streams, 2, timeout=60) == [[7, 7]] * 2


def many_in_order() -> list[int]:
    comm = connect()
    peer = 1 - comm.rank
    handles = [comm.isend(full(n, 1 << (10 + n % 7)), peer) for n in range(40)]
    seen = [value(comm.recv(None, peer)) for _ in range(40)]
    for handle in handles:
        handle.synchronize()
    comm.close()
    return seen


def test_messages_of_a_lane_keep_their_order(ranks: Ranks) -> None:
    assert ranks.run(many_in_order, 2, timeout=60) == [list(range(40))] * 2


def tokens() -> list[int]:
    comm = connect()
    seen = []
    for step in range(5):
        token = comm.broadcast(full(step, 64) if comm.rank == 1 else None, 1)
        seen.append(value(token))
    comm.close()
    return seen


def test_broadcasts_arrive_on_the_device(ranks: Ranks) -> None:
    assert ranks.run(tokens, 2, timeout=60) == [list(range(5))] * 2


def sent_by_threads() -> list[int]:
    comm = connect()
    peer = 1 - comm.rank
    seen: list[int] = [0] * 4

    def exchange(tag: int) -> None:
        torch.cuda.set_device(comm.rank)
        with torch.cuda.stream(torch.cuda.Stream()):
            handle = comm.isend(full(tag + 1), peer, tag)
            seen[tag] = value(comm.recv(None, peer, tag))
            handle.synchronize()

    threads = [Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.close()
    return seen


def test_threads_of_a_rank_exchange_on_tags_of_their_own(ranks: Ranks) -> None:
    assert ranks.run(sent_by_threads, 2, timeout=60) == [[1, 2, 3, 4]] * 2


def dropped_at_once() -> tuple[bool, int]:
    comm = connect()
    swap(comm)
    if comm.rank == 0:
        comm.isend(full(7), 1)
        full(9)  # might get the block
        here.meet("dropped")
    else:
        here.meet("dropped")
    seen = value(comm.recv(None, 0)) if comm.rank == 1 else 7
    empty = until(lambda: not comm.ledger.snapshot().operations)
    comm.close()
    return empty, seen


def test_a_send_whose_tensor_and_handle_are_dropped_sends_what_was_there(ranks: Ranks) -> None:
    assert ranks.run(dropped_at_once, 2, timeout=60) == [(True, 7)] * 2
