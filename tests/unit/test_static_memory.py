"""Receives into memory of the caller's: dicts, shorter messages, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from commlayer_testkit.local import connected, eventually
from torch import Tensor

from commlayer.communicator import Communicator
from commlayer.errors import CommError, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast

INLINE = 256


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    with connected(inline_bytes=INLINE) as comms:
        yield comms


sizes = pytest.mark.parametrize("scale", [1, 100], ids=["inline", "large"])


# Shorter messages


@sizes
def test_a_shorter_message_is_a_view_of_the_first_rows(
    scale: int, pair: list[Communicator]
) -> None:
    a, b = pair
    buffer = torch.full((8, 4 * scale), -1.0)
    sent = torch.arange(12.0 * scale).reshape(3, 4 * scale)
    a.isend(sent, 1)
    got = b.irecv(buffer, 0).result(30)
    assert torch.equal(got, sent)
    assert got.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer[:3], sent)
    assert (buffer[3:] == -1).all()
    a.broadcast(sent + 1, 0, async_op=True)
    got = b.broadcast(buffer, 0)
    assert torch.equal(got, sent + 1)
    assert got.data_ptr() == buffer.data_ptr()


@sizes
def test_any_shape_of_a_shorter_message_goes_into_contiguous_memory(
    scale: int, pair: list[Communicator]
) -> None:
    a, b = pair
    buffer = torch.zeros(10 * scale)
    for shape in ((), (0,), (3,), (2, 2 * scale), (0, 5), (10 * scale,), (5, 2 * scale)):
        sent = torch.ones(shape)
        a.isend(sent, 1)
        got = b.irecv(buffer.fill_(7), 0).result(30)
        if sent.numel() == buffer.numel():
            assert got is buffer
        else:
            assert torch.equal(got, sent)
        assert (buffer.view(-1)[: sent.numel()] == 1).all()
        assert (buffer.view(-1)[sent.numel() :] == 7).all()


@sizes
def test_rows_of_a_strided_target(scale: int, pair: list[Communicator]) -> None:
    a, b = pair
    whole = torch.zeros(6, 4 * scale)
    target = whole[:, : 2 * scale]
    a.isend(torch.ones(2, 2 * scale), 1)
    got = b.irecv(target, 0).result(30)
    assert got.shape == (2, 2 * scale)
    assert got.data_ptr() == whole.data_ptr()
    assert whole.sum() == 4 * scale
    a.isend(torch.ones(2 * scale), 1)
    with pytest.raises(CommError, match="the peer sent float32 of shape") as caught:
        b.irecv(target, 0).wait(30)
    assert "kept" in caught.value.cure
    assert b.irecv(None, 0).result(30).sum() == 2 * scale


# What does not fit is left to the next receive


@sizes
@pytest.mark.parametrize("posted", ["before", "after"])
def test_a_message_that_does_not_fit_is_kept(
    scale: int, posted: str, pair: list[Communicator]
) -> None:
    a, b = pair
    if posted == "after":
        a.isend_object("x", 1, tag=9)
        sends = [a.isend(torch.full((3 * scale,), float(n)), 1, tag=9) for n in (1, 2)]
        b.recv_object(0, tag=9)
    wrong = [torch.zeros(3 * scale - 1), torch.zeros(3 * scale, dtype=torch.int32)]
    handles = [b.irecv(target, 0, tag=9) for target in wrong]
    right = b.irecv(torch.zeros(3 * scale), 0, tag=9)
    new = b.irecv(None, 0, tag=9)
    if posted == "before":
        sends = [a.isend(torch.full((3 * scale,), float(n)), 1, tag=9) for n in (1, 2)]
    for handle in handles:
        with pytest.raises(CommError, match="the peer sent float32 of shape") as caught:
            handle.wait(30)
        assert caught.value.kind is ErrorKind.PROTOCOL
        assert "kept for the next receive" in caught.value.cure
    assert right.result(30).sum() == 3 * scale
    assert new.result(30).sum() == 6 * scale
    for send in sends:
        send.wait(30)
    assert not any(target.any() for target in wrong)


def test_an_unclaimed_message_is_kept_as_often_as_needed(pair: list[Communicator]) -> None:
    a, b = pair
    a.isend(torch.ones(3), 1)
    a.isend(torch.ones(2), 1)
    opened = b.irecv(torch.zeros(1), 0)
    with pytest.raises(CommError):
        opened.wait(30)
    lane = b._connection.peers[0].receives["data", "0"]
    assert eventually(lambda: lane.unclaimed == 2)
    for _ in range(3):
        with pytest.raises(CommError, match=r"of shape \[3\]"):
            b.irecv(torch.zeros(1), 0).wait(30)
    assert b.irecv(torch.zeros(5), 0).result(30).tolist() == [1, 1, 1]
    assert b.irecv(torch.zeros(5), 0).result(30).tolist() == [1, 1]


# Dicts


def buffers(scale: int) -> dict[str, Tensor]:
    return {"h": torch.zeros(4, 8 * scale), "tokens": torch.zeros(6, dtype=torch.long)}


def step(scale: int, rows: int, number: int) -> dict[str, Any]:
    return {
        "h": torch.full((rows, 8 * scale), float(number)),
        "n": number,
        "other": torch.full((3 * scale,), float(number)),
        "tokens": torch.arange(rows) + number,
        "nested": [torch.ones(2)],
    }


@sizes
@pytest.mark.parametrize("rows", [4, 3, 0])
def test_tensors_of_a_dict_are_received_into_given_ones(
    scale: int, rows: int, pair: list[Communicator]
) -> None:
    a, b = pair
    into = buffers(scale)
    for number in range(5):
        sent = step(scale, rows, number)
        a.isend_tensor_dict(sent, 1)
        got = b.irecv_tensor_dict(0, into=into).result(30)
        assert list(got) == list(sent)
        for key in ("h", "tokens"):
            assert torch.equal(got[key], sent[key])
            assert got[key].numel() == 0 or got[key].data_ptr() == into[key].data_ptr()
        assert torch.equal(got["other"], sent["other"])
        assert got["n"] == number
        assert got["nested"][0].tolist() == [1, 1]
    a.isend_tensor_dict(step(scale, rows, 1), 1)
    assert b.recv_tensor_dict(0, into={})["n"] == 1
    a.isend_tensor_dict(step(scale, 4, 9), 1)
    full = b.recv_tensor_dict(0, into=into)
    assert full["h"] is into["h"]


@sizes
def test_one_tensor_under_two_keys(scale: int, pair: list[Communicator]) -> None:
    a, b = pair
    shared = torch.arange(50.0 * scale)
    into = {"x": torch.zeros(50 * scale), "y": torch.zeros(50 * scale)}
    a.isend_tensor_dict({"x": shared, "y": shared, "z": shared}, 1)
    got = b.irecv_tensor_dict(0, into=into).result(30)
    for key in into:
        assert got[key] is into[key]
        assert torch.equal(into[key], shared)
    assert torch.equal(got["z"], shared)


@sizes
def test_a_dict_that_does_not_fit_is_kept(scale: int, pair: list[Communicator]) -> None:
    a, b = pair
    sent = step(scale, 4, 5)
    a.isend_tensor_dict(sent, 1)
    a.isend_tensor_dict({"after": 1}, 1)
    for wrong, said in (
        ({"h": torch.zeros(3, 8 * scale)}, r"'h': the peer sent float32 of shape"),
        ({"h": torch.zeros(4, 8 * scale, dtype=torch.half)}, r"'h': the peer sent float32"),
        ({"missing": torch.zeros(3)}, "no tensor 'missing'"),
        ({"n": torch.zeros(3)}, "no tensor 'n'"),
        ({"nested": torch.zeros(3)}, "no tensor 'nested'"),
    ):
        with pytest.raises(CommError, match=said) as caught:
            b.irecv_tensor_dict(0, into=wrong).wait(30)
        assert caught.value.kind is ErrorKind.PROTOCOL
        assert "kept for the next receive" in caught.value.cure
        assert not any(tensor.any() for tensor in wrong.values())
    into = buffers(scale)
    got = b.irecv_tensor_dict(0, into=into).result(30)
    assert torch.equal(into["h"], sent["h"])
    assert got["n"] == 5
    assert b.recv_tensor_dict(0) == {"after": 1}


def test_a_kind_that_was_not_asked_for_is_lost_as_before(pair: list[Communicator]) -> None:
    a, b = pair
    a.isend_object([torch.ones(3)], 1)
    a.isend_tensor_dict({"x": torch.ones(3)}, 1)
    with pytest.raises(CommError, match="sent an object") as caught:
        b.irecv_tensor_dict(0, into={"x": torch.zeros(3)}).wait(30)
    assert "this message is lost" in caught.value.cure
    assert b.recv_tensor_dict(0)["x"].sum() == 3


def test_what_cannot_be_received_into(pair: list[Communicator]) -> None:
    _, b = pair
    same = torch.zeros(3)
    for into, kind in (
        ([torch.zeros(3)], ErrorKind.CONFIG),
        ({1: torch.zeros(3)}, ErrorKind.CONFIG),
        ({"x": same, "y": same}, ErrorKind.CONFIG),
        ({"x": [1]}, ErrorKind.UNSUPPORTED),
        ({"x": torch.zeros(1, 3).expand(4, 3)}, ErrorKind.UNSUPPORTED),
        ({"x": torch.zeros(3, device="meta")}, ErrorKind.UNSUPPORTED),
    ):
        with pytest.raises(CommError) as caught:
            b.irecv_tensor_dict(0, into=into)  # type: ignore[arg-type]
        assert caught.value.kind is kind
    assert b.ledger.snapshot().operations == ()


@sizes
def test_memory_of_a_dict_that_goes_away(scale: int, pair: list[Communicator]) -> None:
    a, b = pair
    into = {"h": torch.zeros(50 * scale)}
    receive = b.irecv_tensor_dict(0, into=into)
    into["h"].untyped_storage().resize_(0)
    into.clear()
    a.isend_tensor_dict({"h": torch.ones(50 * scale)}, 1)
    with pytest.raises(CommError, match="lost its memory") as caught:
        receive.wait(30)
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    a.isend_tensor_dict({"h": torch.ones(2)}, 1)
    assert b.recv_tensor_dict(0)["h"].sum() == 2


# Deferred broadcasts


@sizes
def test_a_deferred_broadcast_is_taken_into_given_memory(
    scale: int, pair: list[Communicator]
) -> None:
    a, b = pair
    source, sink = DeferredBroadcast(a, 0), DeferredBroadcast(b, 0)
    tokens = torch.zeros(8 * scale, dtype=torch.long)
    for number, width in enumerate((8, 4, 1, 8)):
        sent = torch.arange(width * scale) + number
        source.post(number, sent)
        sink.post(number, into=tokens)
        assert source.take() is sent
        got = sink.take(30)
        assert torch.equal(got, sent)
        assert got.data_ptr() == tokens.data_ptr()
        assert width != 8 or got is tokens
    source.post(9, torch.ones(2 * scale))
    sink.post(9)
    into = torch.zeros(2 * scale)
    assert sink.take(30, into=into) is into
    assert into.sum() == 2 * scale


def test_what_a_deferred_broadcast_cannot_be_put_into_leaves_it_here(
    pair: list[Communicator],
) -> None:
    a, b = pair
    source, sink = DeferredBroadcast(a, 0), DeferredBroadcast(b, 0)
    with pytest.raises(CommError, match="receives nothing"):
        source.post(0, torch.ones(3), into=torch.zeros(3))
    source.post(0, torch.ones(3))
    sink.post(0, into=torch.zeros(2))
    for wrong in (
        torch.zeros(2),
        torch.zeros(3, dtype=torch.half),
        torch.zeros(1).expand(3),
        torch.zeros(3, device="meta"),
    ):
        with pytest.raises(CommError):
            sink.take(30, into=wrong)
        assert sink.pending == 0
    with pytest.raises(CommError, match="the peer sent float32"):
        sink.take(30)
    assert sink.take(30, into=None).tolist() == [1, 1, 1]
    source.take()
    source.post(1, torch.ones(2))
    sink.post(1)
    assert sink.take(30).tolist() == [1, 1]
