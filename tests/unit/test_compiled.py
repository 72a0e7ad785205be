"""Calls inside a function that torch.compile compiles: made as they are, at every shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from commlayer_testkit.local import connected
from torch import Tensor

from commlayer.communicator import Communicator

ROWS = (3, 4, 5, 3, 4, *range(6, 26))
"""More shapes than the compiler compiles one function for."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    with connected(inline_bytes=256, record_sites=True) as comms:
        yield comms


SENDS: dict[str, Callable[[Communicator, Tensor], Any]] = {
    "isend": lambda comm, t: comm.isend(t, 1),
    "send": lambda comm, t: comm.isend(t, 1).wait(60),
    "isend_object": lambda comm, t: comm.isend_object(["x", t], 1),
    "isend_tensor_dict": lambda comm, t: comm.isend_tensor_dict({"t": t}, 1),
    "broadcast": lambda comm, t: comm.broadcast(t, 0, async_op=True),
    "broadcast_object": lambda comm, t: comm.broadcast_object(t, 0, async_op=True),
    "broadcast_tensor_dict": lambda comm, t: comm.broadcast_tensor_dict({"t": t}, 0, True),
}


def received(comm: Communicator, name: str) -> Tensor:
    handles: dict[str, Callable[[], Any]] = {
        "isend_object": lambda: comm.irecv_object(0).result(60)[1],
        "isend_tensor_dict": lambda: comm.irecv_tensor_dict(0).result(60)["t"],
        "broadcast": lambda: comm.broadcast(None, 0, async_op=True).result(60),
        "broadcast_object": lambda: comm.broadcast_object(None, 0, async_op=True).result(60),
        "broadcast_tensor_dict": lambda: comm.broadcast_tensor_dict(None, 0, True).result(60)["t"],
    }
    result: Tensor = handles.get(name, lambda: comm.irecv(None, 0).result(60))()
    return result


@pytest.mark.parametrize("name", SENDS)
def test_sends_of_changing_shapes(name: str, pair: list[Communicator]) -> None:
    a, b = pair
    weights = torch.eye(8)
    send = SENDS[name]
    if name == "send":
        receives = iter([b.irecv(None, 0) for _ in ROWS])

    def stage(x: Tensor) -> Tensor:
        hidden = x @ weights
        send(a, hidden)
        return hidden + 1

    compiled = torch.compile(stage, backend="eager")
    for rows in ROWS:
        x = torch.full((rows, 8), float(rows))
        assert torch.equal(compiled(x), x + 1)
        got = next(receives).result(60) if name == "send" else received(b, name)
        assert torch.equal(got, x)


def test_receives_of_changing_shapes(pair: list[Communicator]) -> None:
    a, b = pair

    def stage(x: Tensor) -> Tensor:
        target = torch.zeros_like(x)
        handle = b.irecv(target, 0)
        other = b.irecv(None, 0)
        handle.wait(60)
        both = b.irecv_tensor_dict(0).result(60)
        return target * 2 + other.result(60) + both["t"]

    compiled = torch.compile(stage, backend="eager")
    for rows in ROWS:
        x = torch.full((rows, 8), float(rows))
        a.isend(x, 1)
        a.isend(x + 1, 1)
        a.isend_tensor_dict({"t": x}, 1)
        assert torch.equal(compiled(x), x * 4 + 1)


def test_the_line_that_posted_is_the_callers(pair: list[Communicator]) -> None:
    a, b = pair
    kept = []

    def stage(x: Tensor) -> Tensor:
        kept.append(a.isend_object(1, 1))
        return x + 1

    torch.compile(stage, backend="eager")(torch.ones(2))
    assert b.irecv_object(0).result(60) == 1
    site = kept[0]._operation.site
    assert site.startswith(__file__)
