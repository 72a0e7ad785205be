"""What arrives is what was sent; what does not fit fails its own receive and no other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bits import filled, same
from commlayer_testkit.local import WAITED, Hub, connect_rank, connected, on_every_rank
from torch import Tensor

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind
from commlayer.wire.tensors import DTYPES

SIZES = {"empty": 0, "inline": 24, "large": 4096}


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    with connected() as comms:
        yield comms


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_by_every_way(dtype: torch.dtype, size: int, pair: list[Communicator]) -> None:
    a, b = pair
    sent = filled(dtype, size)
    a.isend(sent, 1)
    a.isend(sent, 1)
    a.isend_object([sent], 1)
    a.broadcast(sent, 0, async_op=True)
    a.broadcast(sent, 0, async_op=True)
    a.broadcast_tensor_dict({"x": sent}, 0, async_op=True)
    into, also = torch.empty_like(sent), torch.empty_like(sent)
    b.recv(into, 0)
    b.broadcast(also, 0)
    for received in (
        into,
        b.recv(None, 0),
        b.recv_object(0)[0],
        also,
        b.broadcast(None, 0),
        b.broadcast_tensor_dict(None, 0)["x"],
    ):
        assert same(sent, received)


def base(size: int) -> Tensor:
    return torch.arange(float(size * size)).reshape(size, size)


VIEWS = {
    "transposed": lambda n: base(n).t(),
    "column": lambda n: base(n)[:, 1],
    "every other": lambda n: base(n)[::2, 1::2],
    "expanded": lambda n: torch.arange(float(n)).expand(3, n),
    "with an offset": lambda n: base(n)[2:],
    "without dimensions": lambda n: base(n)[1, 1],
    "with a gradient": lambda n: base(n).requires_grad_(),
    "not a leaf": lambda n: base(n).requires_grad_() * 2,
    "parameter": lambda n: torch.nn.Parameter(base(n)),
    "conjugated": lambda n: torch.complex(base(n), base(n)).conj(),
    "imaginary part": lambda n: torch.complex(base(n), base(n)).conj().imag,
    "flipped": lambda n: base(n).flip(0),
    "no rows": lambda n: base(n)[:0],
}


@pytest.mark.parametrize("size", [4, 80], ids=["inline", "large"])
@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_every_view_arrives_as_a_plain_tensor(
    make: Any, size: int, pair: list[Communicator]
) -> None:
    a, b = pair
    sent = make(size)
    expected = sent.detach().resolve_conj().resolve_neg().contiguous()
    a.isend(sent, 1)
    a.isend_tensor_dict({"x": sent}, 1)
    a.broadcast(sent, 0, async_op=True)
    for received in (b.recv(None, 0), b.recv_tensor_dict(0)["x"], b.broadcast(None, 0)):
        assert same(expected, received)
        assert received.is_contiguous()
        assert not received.requires_grad
        assert not received.is_inference()


def test_inference_tensors_travel_and_are_written(pair: list[Communicator]) -> None:
    a, b = pair
    with torch.inference_mode():
        for size in (3, 5000):
            a.isend(torch.ones(size), 1)
            into = torch.zeros(size)
            b.recv(into, 0)
            assert into.sum() == size


TARGETS = {
    "transposed": lambda: torch.zeros(50, 60).t(),
    "every other": lambda: torch.zeros(60, 100)[:, ::2],
    "slice": lambda: torch.zeros(120, 50)[60:],
    "another shape": lambda: torch.zeros(3000),
    "leaf with a gradient": lambda: torch.zeros(60, 50, requires_grad=True),
}


@pytest.mark.parametrize("rows", [1, 60], ids=["inline", "large"])
@pytest.mark.parametrize("make", TARGETS.values(), ids=TARGETS)
def test_a_target_may_have_any_layout_without_overlap(
    make: Any, rows: int, pair: list[Communicator]
) -> None:
    a, b = pair
    target = make()
    target = target[: rows * 50] if target.dim() == 1 else target[:rows]
    sent = torch.arange(float(target.numel())).reshape(target.shape)
    a.isend(sent, 1)
    result = b.recv(target, 0)
    assert torch.equal(target.detach(), sent)
    assert result.data_ptr() == target.data_ptr()


def test_what_is_received_into_is_what_the_handle_returns(pair: list[Communicator]) -> None:
    a, b = pair
    target = torch.zeros(3)
    a.isend(torch.ones(3), 1)
    assert b.recv(target, 0) is target
    a.broadcast(torch.ones(3), 0, async_op=True)
    assert b.broadcast(target, 0) is target


def test_a_dict_of_everything_keeps_its_order(pair: list[Communicator]) -> None:
    a, b = pair
    sent = {
        "z": torch.arange(5),
        "empty": torch.empty(0, 7),
        "a": None,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "large": torch.arange(9000),
        "nested": {"y": [torch.ones(2), (1, 2.5, True)], 3: {"deep": torch.zeros(0)}},
        "text": "ünïcode",
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "dtype": torch.float8_e4m3fn if hasattr(torch, "float8_e4m3fn") else torch.int8,
        "size": torch.Size([1, 0]),
        "set": {1, 2},
        "big": 2**100,
        "": -0.0,
    }
    a.isend_tensor_dict(sent, 1)
    received = b.recv_tensor_dict(0)
    assert list(received) == list(sent)
    assert list(received["nested"]) == ["y", 3]
    for key in ("z", "empty", "scalar", "large"):
        assert same(sent[key], received[key])
    assert received["nested"]["y"][1] == (1, 2.5, True)
    assert received["nested"][3]["deep"].shape == (0,)
    for key in ("a", "text", "bytes", "complex", "dtype", "size", "set", "big", ""):
        assert received[key] == sent[key]
        assert type(received[key]) is type(sent[key])


@pytest.mark.parametrize("value", [{}, {"x": torch.empty(0)}, {"x": None}])
def test_small_dicts(value: Any, pair: list[Communicator]) -> None:
    a, b = pair
    a.isend_tensor_dict(value, 1)
    received = b.recv_tensor_dict(0)
    assert list(received) == list(value)


# What does not fit

MISFITS = {
    "too short": lambda: torch.zeros(2),
    "empty": lambda: torch.zeros(0),
    "another dtype": lambda: torch.zeros(3, dtype=torch.int32),
    "the bytes in another dtype": lambda: torch.zeros(12, dtype=torch.uint8),
}


@pytest.mark.parametrize("scale", [1, 2000], ids=["inline", "large"])
@pytest.mark.parametrize("make", MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("call", ["irecv", "broadcast"])
def test_a_message_that_does_not_fit_fails_its_receive_only(
    make: Any, scale: int, call: str, pair: list[Communicator]
) -> None:
    a, b = pair
    target = torch.cat([make().contiguous()] * scale).fill_(7)
    receive = b.irecv(target, 0) if call == "irecv" else b.broadcast(target, 0, async_op=True)
    following = b.irecv(None, 0) if call == "irecv" else b.broadcast(None, 0, async_op=True)
    for value in (torch.ones(3 * scale), torch.full((3 * scale,), 2.0)):
        if call == "irecv":
            a.isend(value, 1)
        else:
            a.broadcast(value, 0, async_op=True)
    with pytest.raises(CommError, match=r"the peer sent float32 of shape \[") as caught:
        receive.wait(30)
    assert caught.value.kind is ErrorKind.PROTOCOL
    assert "rank 0" in caught.value.operation
    assert torch.equal(target, torch.full_like(target, 7))
    if call == "irecv":  # the message was left to the next
        assert torch.equal(following.result(30), torch.ones(3 * scale))
        following = b.irecv(None, 0)
    assert torch.equal(following.result(30), torch.full((3 * scale,), 2.0))
    a.drain(30)


def test_an_object_where_a_dict_was_expected_and_the_reverse(pair: list[Communicator]) -> None:
    a, b = pair
    for size in (3, 5000):
        wrong = [b.irecv_tensor_dict(0), b.irecv_object(0)]
        right = [b.irecv_object(0), b.irecv_tensor_dict(0)]
        a.isend_object([torch.ones(size)], 1)
        a.isend_tensor_dict({"x": torch.ones(size)}, 1)
        a.isend_object("right", 1)
        a.isend_tensor_dict({"x": "right"}, 1)
        causes = [
            "the peer sent an object, this rank receives a tensor dict",
            "the peer sent a tensor dict, this rank receives an object",
        ]
        for handle, cause in zip(wrong, causes, strict=True):
            with pytest.raises(CommError, match=cause):
                handle.wait(30)
        assert [handle.result(30) for handle in right] == ["right", {"x": "right"}]


def test_broadcasts_of_another_kind() -> None:
    with connected() as (a, b):
        a.broadcast_object("x", 0, async_op=True)
        with pytest.raises(CommError, match="the peer sent an object, this rank receives a tensor"):
            b.broadcast(None, 0)
        a.broadcast(torch.ones(2), 0, async_op=True)
        assert b.broadcast(None, 0).sum() == 2


def test_a_rank_that_skips_a_broadcast_is_told_both_steps() -> None:
    hub = Hub(3)

    def body(rank: int) -> Any:
        with connect_rank(hub, rank) as comm:
            if rank == 0:
                for step in range(2):
                    comm.broadcast(torch.full((2,), step), 0, async_op=True)
                comm.recv_object(2)
                comm.recv_object(1)
                return None
            if rank == 2:
                comm.broadcast(None, 1, async_op=True)
            try:
                outcome = comm.broadcast(None, 0).tolist()
            except CommError as error:
                outcome = error
            comm.send_object("done", 0)
            return outcome

    _, well, error = on_every_rank(hub, body)
    assert well == [0, 0]
    assert error.kind is ErrorKind.PROTOCOL
    assert "the peer is at broadcast 0 of this channel, this rank at 1" in error.cause
    assert hub.violations == []


def test_the_source_of_a_broadcast_needs_a_tensor() -> None:
    with connected() as (a, b):
        with pytest.raises(CommError, match="rank src has no tensor") as caught:
            a.broadcast(None, 0)
        assert caught.value.kind is ErrorKind.CONFIG
        a.broadcast(torch.ones(2), 0, async_op=True)
        assert b.broadcast(None, 0).numel() == 2


def test_a_pickle_travels_only_where_both_allow_it() -> None:
    with connected(allow_pickle=True) as (a, b):
        a.isend_object({"error": ZeroDivisionError("x")}, 1)
        assert repr(b.recv_object(0)["error"]) == "ZeroDivisionError('x')"
    with connected() as (a, _), pytest.raises(CommError, match="which cannot be sent"):
        a.isend_object({"error": ZeroDivisionError("x")}, 1)


def test_facts_and_settings_are_shown() -> None:
    with connected(inline_bytes=100) as (a, b):
        assert [(comm.rank, comm.world_size, comm.backend) for comm in (a, b)] == [
            (0, 2, "local"),
            (1, 2, "local"),
        ]
        assert a.semantics == WAITED
        assert a.config.inline_bytes == 100
        assert repr(a) == "<Communicator rank 0 of 2, local, channel data, open>"
        assert a.channel("fold").ledger is a.ledger
