"""Slices on a device: gathered on the waiting stream, ordered before every other one.

Both ranks are sender and receiver: each sends its part to the other, and both gather.
"""

from __future__ import annotations

import pytest
import torch
from commlayer_testkit.sim.mount_core import connect, connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank
from exploring import survives

from commlayer import Communicator

DEVICE = ("hccl", "nccl", "xccl")


def read(rank: Rank, tensor: torch.Tensor) -> list[int]:
    out = rank.arena.empty(*tensor.shape)
    rank.device.launch("read", lambda a, b: b.copy_(a), reads=[tensor], writes=[out])
    rank.device.current_stream().synchronize()
    return out.tolist()


def send(rank: Rank, comm: Communicator, step: int) -> None:
    comm.isend_tensor_dict(
        {
            "x": rank.arena.full(step + 1, 8),
            "own": rank.arena.full(10 + rank.index, 4),
            "host": torch.full((4,), step),
        },
        1 - rank.index,
        comm,
        {"own": False},
    )


def two_messages(rank: Rank) -> None:
    """Sent before anything is received, and waited in another order on each rank."""
    comm = connect_device(rank, GLOO)
    for step in range(2):
        send(rank, comm, step)
    handles = [comm.irecv_tensor_dict(1 - rank.index, comm) for _ in range(2)]
    for step in (0, 1) if rank.index == 0 else (1, 0):
        value = handles[step].result()
        assert read(rank, value["x"]) == [step + 1] * 8
        assert read(rank, value["own"]) == [11 - rank.index] * 4
        assert value["host"].tolist() == [step] * 4
        handles[step].synchronize()
        assert handles[step].is_completed()
        del value
    handles.clear()
    comm.close(30)
    rank.device.synchronize()
    assert not comm.ledger.snapshot().operations
    assert rank.arena.in_use == 0


@pytest.mark.parametrize("on", DEVICE)
def test_gathered_on_a_device(on: str) -> None:
    survives(two_messages, on, budget=20)


def two_streams(rank: Rank) -> None:
    """Two threads wait for one handle on two streams; the value is dropped while both read."""
    comm = connect_device(rank, GLOO)
    send(rank, comm, 4)
    handle = comm.irecv_tensor_dict(1 - rank.index, comm)
    got: list[list[int]] = []

    def reader() -> None:
        with rank.device.stream():
            got.append(read(rank, handle.result()["x"]))

    tasks = [rank.spawn(reader, f"reader {n}") for n in range(2)]
    for task in tasks:
        task.join()
    assert got == [[5] * 8] * 2
    comm.close(30)


@pytest.mark.parametrize("on", DEVICE)
def test_every_waiting_stream_is_ordered(on: str) -> None:
    survives(two_streams, on, budget=15)


def taken_in_elsewhere(rank: Rank) -> None:
    """Waiting for the second message takes in the first one's part, on another stream."""
    comm = connect_device(rank, GLOO)
    for step in range(2):
        send(rank, comm, step)
    handles = [comm.irecv_tensor_dict(1 - rank.index, comm) for _ in range(2)]
    with rank.device.stream():
        handles[1].wait()
    with rank.device.stream():
        assert read(rank, handles[0].result()["x"]) == [1] * 8
    comm.close(30)


@pytest.mark.parametrize("on", DEVICE)
def test_a_part_taken_in_on_another_stream_is_ordered(on: str) -> None:
    survives(taken_in_elsewhere, on, budget=25)


def dropped_while_read(rank: Rank) -> None:
    """Gathered on one stream, read on another and dropped: the first must not reuse it yet."""
    comm = connect_device(rank, GLOO)
    send(rank, comm, 4)
    handle = comm.irecv_tensor_dict(1 - rank.index, comm)
    out = rank.arena.empty(8)
    first, second = rank.device.stream(), rank.device.stream()
    with first:
        handle.wait()
    with second:
        value = handle.result()
        rank.device.launch("read", lambda a, b: b.copy_(a), reads=[value["x"]], writes=[out])
    del handle, value
    with first:
        rank.arena.full(99, 8)
    second.synchronize()
    assert out.tolist() == [5] * 8
    comm.close(30)


@pytest.mark.parametrize("on", DEVICE)
def test_the_gathered_memory_is_recorded_on_every_waiting_stream(on: str) -> None:
    survives(dropped_while_read, on, budget=25)


def on_the_host(rank: Rank) -> None:
    comm = connect(rank)
    for step in range(2):
        comm.isend_tensor_dict({"x": torch.arange(6) + step}, 1 - rank.index, comm)
    handles = [comm.irecv_tensor_dict(1 - rank.index, comm) for _ in range(2)]
    while not handles[1].is_completed():
        rank.sleep(0.001)
    for step in (1, 0):
        assert handles[step].result()["x"].tolist() == list(range(step, 6 + step))
    comm.close(30)
    assert not comm.ledger.snapshot().operations


@pytest.mark.parametrize("on", ["gloo", "mpi"])
def test_gathered_on_the_host(on: str) -> None:
    survives(on_the_host, on, budget=20)
