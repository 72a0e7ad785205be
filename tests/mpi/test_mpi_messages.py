"""What arrives over MPI, in which order, and what handles promise there."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from commlayer_testkit.conformance.ranks.stopping import stopped
from mpi_job import Jobs, meet
from views import exchange

import commlayer
from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind

MIB = 1 << 20


def connect(**settings: Any) -> Communicator:
    limits = {"connect_timeout": 20.0, "close_timeout": 10.0}
    return commlayer.connect({"backend": "mpi", **limits, **settings})


def pattern(number: int, size: int) -> torch.Tensor:
    """`size` bytes (below 8 or a multiple of it) that differ by `number` and place."""
    if size < 8:
        return torch.full((size,), number, dtype=torch.uint8)
    return (torch.arange(size // 8) * (number + 3)).view(torch.uint8)


def exchange_tensors() -> None:
    cases = [
        torch.arange(12.0).reshape(3, 4),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.empty(0, 5),
        torch.tensor(7),
        torch.arange(3 * MIB, dtype=torch.int16),
        torch.randn(100).to(torch.bfloat16),
        torch.tensor([True, False]),
    ]
    with connect() as comm:
        peer = 1 - comm.rank
        for tag, tensor in enumerate(cases):
            if comm.rank == 0:
                comm.send(tensor, peer, tag=tag)
                back = comm.recv_object(peer)
                assert back == (list(tensor.shape), str(tensor.dtype))
            else:
                target = torch.empty_like(tensor)
                comm.recv(target, peer, tag=tag)
                if tensor.dtype != torch.bfloat16:
                    assert torch.equal(target, tensor)
                comm.send_object((list(target.shape), str(target.dtype)), peer)


def exchange_values() -> None:
    value = {"text": "grüße", "numbers": [1, 2.5, None], "nested": {"bytes": b"\0\1"}}
    hidden = pattern(1, 2 * MIB)
    with connect() as comm:
        peer = 1 - comm.rank
        sent = [comm.isend_object(value, peer), comm.isend_tensor_dict({"h": hidden, "n": 3}, peer)]
        assert comm.recv_object(peer) == value
        received = comm.recv_tensor_dict(peer)
        assert received["n"] == 3
        assert torch.equal(received["h"], hidden)
        for handle in sent:
            handle.wait(20)


def broadcast_from_each() -> None:
    with connect() as comm:
        for src in range(comm.world_size):
            for size in (3, MIB):
                value = pattern(src, size) if comm.rank == src else None
                assert torch.equal(comm.broadcast(value, src=src), pattern(src, size))


def drop_every_handle() -> None:
    with connect() as comm:
        peer = 1 - comm.rank
        for number in range(40):
            comm.isend(pattern(number, MIB), peer)
            torch.full((MIB,), 255, dtype=torch.uint8)
        gc.collect()
        meet()
        target = torch.empty(MIB, dtype=torch.uint8)
        for number in range(40):
            comm.recv(target, peer)
            assert torch.equal(target, pattern(number, MIB))


def complete_without_a_wait() -> None:
    with connect() as comm:
        target = torch.empty(MIB, dtype=torch.uint8)
        if comm.rank == 0:
            handle = comm.isend(pattern(1, MIB), 1)
            assert not handle.is_completed()
        else:
            handle = comm.irecv(target, 0, tag=1)
            assert not handle.is_completed()
        meet()
        if comm.rank == 0:
            comm.isend(pattern(2, MIB), 1, tag=1)
        else:
            early = torch.empty(MIB, dtype=torch.uint8)
            comm.irecv(early, 0)
        while not handle.is_completed():
            time.sleep(0.001)
        if comm.rank == 1:
            assert torch.equal(target, pattern(2, MIB))
        meet()


def let_timeouts_expire() -> None:
    with connect() as comm:
        target = torch.empty(MIB, dtype=torch.uint8)
        handle = comm.isend(pattern(5, MIB), 1) if comm.rank == 0 else comm.irecv(target, 0, tag=1)
        for timeout in (0.0, 0.001, 0.05):
            with pytest.raises(CommTimeout):
                handle.wait(timeout)
        meet()
        if comm.rank == 0:
            comm.send(pattern(6, MIB), 1, tag=1)
        else:
            first = torch.empty(MIB, dtype=torch.uint8)
            comm.recv(first, 0)
            assert torch.equal(first, pattern(5, MIB))
        handle.wait(20)
        handle.wait(0)
        if comm.rank == 1:
            assert torch.equal(target, pattern(6, MIB))


def stop_the_receiver() -> None:
    with connect() as comm:
        if comm.rank == 1:
            comm.send_object(os.getpid(), 0)
            target = torch.empty(MIB, dtype=torch.uint8)
            comm.recv(target, 0)
            assert torch.equal(target, pattern(4, MIB))
            return
        receiver = comm.recv_object(1)
        os.kill(receiver, signal.SIGSTOP)
        try:
            while not stopped(receiver):
                time.sleep(0.01)
            handle = comm.isend(pattern(4, MIB), 1)
            with pytest.raises(CommTimeout):
                handle.wait(0.1)
        finally:
            os.kill(receiver, signal.SIGCONT)
        handle.wait(20)


def wait_from_many_threads() -> list[str]:
    outcomes: list[str] = []
    with connect() as comm:
        target = torch.empty(MIB, dtype=torch.uint8)
        handle = comm.isend(pattern(8, MIB), 1) if comm.rank == 0 else comm.irecv(target, 0)

        def wait() -> None:
            handle.wait(20)
            outcomes.append("done")

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    handle.wait(0)
    assert comm.rank == 0 or torch.equal(target, pattern(8, MIB))
    return outcomes


def count_to(total: int) -> None:
    with connect() as comm:
        if comm.rank == 0:
            for number in range(total):
                comm.isend_object(number, 1)
        else:
            for number in range(total):
                assert comm.recv_object(0) == number


def send_from_many_threads() -> None:
    with connect() as comm:

        def send(tag: int) -> None:
            for number in range(200):
                comm.isend(torch.tensor([tag, number]), 1, tag=tag)

        def receive(tag: int) -> None:
            target = torch.empty(2, dtype=torch.int64)
            for number in range(200):
                comm.recv(target, 0, tag=tag)
                if target.tolist() != [tag, number]:
                    wrong.append((tag, number, target.tolist()))

        wrong: list[Any] = []
        work = send if comm.rank == 0 else receive
        threads = [threading.Thread(target=work, args=(tag,)) for tag in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not wrong


def send_much(size: int) -> None:
    with connect() as comm:
        if comm.rank == 0:
            comm.send(pattern(9, size), 1)
        else:
            target = torch.empty(size, dtype=torch.uint8)
            comm.recv(target, 0)
            assert torch.equal(target, pattern(9, size))


def close_with_sends_pending() -> None:
    comm = connect()
    if comm.rank == 0:
        comm.isend(pattern(1, MIB), 1)
        comm.isend_object("last", 1)
        meet()
        comm.close()
        with pytest.raises(CommError, match="has closed it"):
            comm.isend_object("more", 1)
    else:
        target = torch.empty(MIB, dtype=torch.uint8)
        meet()
        comm.recv(target, 0)
        assert torch.equal(target, pattern(1, MIB))
        assert comm.recv_object(0) == "last"
        comm.close()


def close_with_a_receive_pending() -> ErrorKind | None:
    with connect() as comm:
        if comm.rank == 0:
            return None
        with pytest.raises(CommError, match="closed") as caught:
            comm.recv_object(0)
        return caught.value.kind


def use_the_largest_tag() -> None:
    names = tuple(f"channel-{number:04}" for number in range(1000))
    with connect(channels=names) as comm:
        peer = 1 - comm.rank
        for name in (names[0], names[500], names[-1]):
            channel = comm.channel(name)
            channel.isend(torch.tensor([len(name), comm.rank]), peer, tag=65535)
            target = torch.empty(2, dtype=torch.int64)
            channel.recv(target, peer, tag=65535)
            assert target.tolist() == [len(name), peer]


def connect_several() -> None:
    comms = {name: connect(name=name) for name in ("a", "b")}
    for name, comm in comms.items():
        comm.isend_object(f"through {name}", 1 - comm.rank)
    for name, comm in reversed(comms.items()):
        assert comm.recv_object(1 - comm.rank) == f"through {name}"
        comm.close()


@pytest.mark.parametrize(
    "body",
    [
        exchange_tensors,
        exchange_values,
        broadcast_from_each,
        drop_every_handle,
        complete_without_a_wait,
        let_timeouts_expire,
        stop_the_receiver,
        send_from_many_threads,
        close_with_sends_pending,
        use_the_largest_tag,
        connect_several,
    ],
)
def test_on_two_ranks(mpi: Jobs, body: Any) -> None:
    mpi(2).run(body)


def test_any_thread_may_wait_again_and_after_close(mpi: Jobs) -> None:
    assert mpi(2).run(wait_from_many_threads) == [["done"] * 4] * 2


def random_layouts() -> None:
    with connect(inline_bytes=1024) as comm:
        exchange(comm, 150, 3000)


def test_random_layouts_of_source_and_target(mpi: Jobs) -> None:
    mpi(2).run(random_layouts)


def test_ten_thousand_messages_arrive_in_order(mpi: Jobs) -> None:
    mpi(2).run(count_to, 10_000)


def test_a_message_of_128_mib_arrives(mpi: Jobs) -> None:
    mpi(2).run(send_much, 128 * MIB)


def test_a_receive_from_a_rank_that_closes_fails(mpi: Jobs) -> None:
    assert mpi(2).run(close_with_a_receive_pending) == [None, ErrorKind.CLOSED]


def test_three_ranks_broadcast_from_each(mpi: Jobs) -> None:
    mpi(3).run(broadcast_from_each)
