"""Broadcasts of every kind, from every rank, and of a width that changes."""

from __future__ import annotations

import pytest
import torch
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, ErrorKind


def every_kind_from_every_rank(elements: int, reaping: str) -> None:
    comm = here.connect(reaping=reaping)
    for src in range(comm.world_size):
        mine = comm.rank == src
        expected = torch.full((elements,), float(src))
        into = expected.clone() if mine else torch.empty(elements)
        assert comm.broadcast(into, src) is into
        assert torch.equal(into, expected)
        assert torch.equal(comm.broadcast(expected if mine else None, src), expected)
        assert comm.broadcast_object(("o", src) if mine else None, src) == ("o", src)
        tensors = comm.broadcast_tensor_dict({"b": expected, "a": src} if mine else None, src)
        assert list(tensors) == ["b", "a"]
        assert torch.equal(tensors["b"], expected)
    comm.close()


@pytest.mark.parametrize("reaping", ["background", "fifo"])
@pytest.mark.parametrize("elements", [16, 1 << 17], ids=["inline", "large"])
def test_every_kind_from_every_rank(ranks: Ranks, elements: int, reaping: str) -> None:
    ranks.run(every_kind_from_every_rank, 3, elements, reaping)


def asynchronous() -> None:
    comm = here.connect()
    steps = 6
    handles = []
    for step in range(steps):
        src = step % comm.world_size
        mine = comm.rank == src
        handles.append(comm.broadcast(torch.tensor([step]) if mine else None, src, async_op=True))
        handles.append(comm.broadcast_object({"step": step} if mine else 0, src, async_op=True))
    for step in reversed(range(steps)):
        assert handles[2 * step].result(20).tolist() == [step]
        assert handles[2 * step + 1].result(20) == {"step": step}
    comm.close()


def test_asynchronous_broadcasts_taken_in_reverse(ranks: Ranks) -> None:
    ranks.run(asynchronous, 3)


def width_changes() -> None:
    comm = here.connect()
    for width in (1, 7, 3, 0, 5000, 2, 5000):
        tokens = torch.arange(2 * width).reshape(2, width)
        received = comm.broadcast(tokens if comm.rank == 0 else None, 0)
        assert torch.equal(received, tokens)
    comm.close()


def test_the_width_of_a_step_travels_with_it(ranks: Ranks) -> None:
    ranks.run(width_changes, 2)


def wrong_width_fails_alone() -> None:
    comm = here.connect()
    if comm.rank == 0:
        comm.broadcast(torch.arange(4), 0)
        comm.broadcast(torch.arange(5), 0)
    else:
        with pytest.raises(CommError, match=r"shape \[4\]") as caught:
            comm.broadcast(torch.empty(3, dtype=torch.int64), 0)
        assert caught.value.kind is ErrorKind.PROTOCOL
        assert comm.broadcast(None, 0).tolist() == [0, 1, 2, 3, 4]
    comm.close()


def test_a_wrong_width_fails_that_broadcast_only(ranks: Ranks) -> None:
    ranks.run(wrong_width_fails_alone, 2)


def alone() -> None:
    comm = here.connect()
    tensor = torch.ones(3)
    assert comm.broadcast(tensor, 0) is tensor
    handle = comm.broadcast_object({"x": 1}, 0, async_op=True)
    assert handle.is_completed()
    assert handle.result(0) == {"x": 1}
    tensors = {"t": tensor}
    assert comm.broadcast_tensor_dict(tensors, 0) is tensors
    assert comm.ledger.snapshot().peak_sends == 0
    with pytest.raises(CommError, match="not a rank"):
        comm.broadcast(tensor, 1)
    with pytest.raises(CommError, match="only rank"):
        comm.isend(tensor, 0)
    comm.drain()
    comm.close()
    with pytest.raises(CommError) as caught:
        comm.broadcast(tensor, 0)
    assert caught.value.kind is ErrorKind.CLOSED


def test_a_group_of_one(ranks: Ranks) -> None:
    ranks.run(alone, 1)


def channels_count_apart() -> None:
    comm = here.connect(channels=("draft",))
    draft = comm.channel("draft")
    mine = comm.rank == 0
    first = comm.broadcast(torch.tensor([1]) if mine else None, 0, async_op=True)
    on_draft = [
        draft.broadcast(torch.tensor([step]) if mine else None, 0, async_op=True)
        for step in range(3)
    ]
    second = comm.broadcast(torch.tensor([2]) if mine else None, 0, async_op=True)
    assert second.result(20).tolist() == [2]
    assert [handle.result(20).item() for handle in on_draft] == [0, 1, 2]
    assert first.result(20).tolist() == [1]
    comm.close()


def test_broadcasts_of_channels_are_independent(ranks: Ranks) -> None:
    ranks.run(channels_count_apart, 2)
