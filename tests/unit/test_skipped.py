"""A broadcast that one rank skips is an error there, and never the value of another step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from commlayer_testkit.local import connected, eventually

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind


def broadcast(comm: Communicator, kind: str, step: int, **options: Any) -> Any:
    mine = comm.rank == 0
    if kind == "tensor":
        value = torch.full((4,), float(step)) if mine else None
        return comm.broadcast(value, 0, async_op=True, step=step, **options)
    if kind == "object":
        return comm.broadcast_object(step if mine else None, 0, async_op=True, step=step)
    return comm.broadcast_tensor_dict({"x": step} if mine else None, 0, async_op=True, step=step)


@pytest.mark.parametrize("kind", ["tensor", "object", "dict"])
def test_a_step_that_a_receiver_skips_is_an_error_at_the_next(kind: str) -> None:
    with connected() as (a, b):
        sent = [broadcast(a, kind, step) for step in (0, 1, 2)]
        broadcast(b, kind, 0).wait(30)
        with pytest.raises(
            CommError, match=r"the peer is at step 1 .* this rank at step 2"
        ) as caught:
            broadcast(b, kind, 2).wait(30)
        assert caught.value.kind is ErrorKind.PROTOCOL
        for handle in sent:
            handle.wait(30)


@pytest.mark.parametrize("kind", ["tensor", "object", "dict"])
def test_a_step_that_the_source_skips_is_an_error(kind: str) -> None:
    with connected() as (a, b):
        broadcast(a, kind, 0)
        broadcast(a, kind, 2)
        broadcast(b, kind, 0).wait(30)
        with pytest.raises(CommError, match=r"the peer is at step 2 .* this rank at step 1"):
            broadcast(b, kind, 1).wait(30)


def test_steps_and_none_do_not_mix() -> None:
    with connected() as (a, b):
        a.broadcast_object(1, 0, async_op=True, step=0)
        with pytest.raises(CommError, match=r"the peer is at step 0 .* this rank at broadcast 0"):
            b.broadcast_object(None, 0)
        a.broadcast_object(1, 0, async_op=True)
        with pytest.raises(CommError, match=r"the peer is at broadcast 1 .* this rank at step 1"):
            b.broadcast_object(None, 0, step=1)
        a.broadcast_object("fine", 0, async_op=True, step=1 << 40)
        assert b.broadcast_object(None, 0, step=1 << 40) == "fine"


@pytest.mark.parametrize("step", [-1, True, 1.0, "0", [1], 1 << 62])
def test_what_is_no_step(step: Any) -> None:
    with connected() as (a, _), pytest.raises(CommError, match="step is a number") as caught:
        a.broadcast_object(1, 0, step=step)
    assert caught.value.kind is ErrorKind.CONFIG


def test_closing_says_that_a_broadcast_was_skipped(caplog: pytest.LogCaptureFixture) -> None:
    with connected() as (a, b):
        for step in range(3):
            a.broadcast_object(step, 0, async_op=True)
        for _ in range(2):
            b.broadcast_object(None, 0)
        lane = b._connection.peers[0].receives["broadcast", "broadcast"]
        assert eventually(lambda: lane.unclaimed == 1)
        a.close(30)
        assert "nobody has asked" not in caplog.text
        b.close(30)
    assert "nobody has asked for 1 broadcasts of rank 0 on channel 'broadcast'" in caplog.text
    assert "step=" in caplog.text
