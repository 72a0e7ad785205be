"""Wrong arguments: refused by name, before anything leaves, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from bits import without_memory
from commlayer_testkit.local import WAITED, Hub, connect_rank, connected

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind

ONE = torch.ones(1)

CALLS: dict[str, Callable[[Communicator, Any], Any]] = {
    "isend": lambda comm, peer: comm.isend(ONE, peer),
    "irecv": lambda comm, peer: comm.irecv(None, peer),
    "send": lambda comm, peer: comm.send(ONE, peer),
    "recv": lambda comm, peer: comm.recv(None, peer),
    "isend_object": lambda comm, peer: comm.isend_object(1, peer),
    "irecv_object": lambda comm, peer: comm.irecv_object(peer),
    "isend_tensor_dict": lambda comm, peer: comm.isend_tensor_dict({}, peer),
    "irecv_tensor_dict": lambda comm, peer: comm.irecv_tensor_dict(peer),
}
BROADCASTS: dict[str, Callable[[Communicator, Any], Any]] = {
    "broadcast": lambda comm, src: comm.broadcast(ONE, src),
    "broadcast_object": lambda comm, src: comm.broadcast_object(1, src),
    "broadcast_tensor_dict": lambda comm, src: comm.broadcast_tensor_dict({}, src),
}
point_to_point = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
every_call = pytest.mark.parametrize(
    "call", (CALLS | BROADCASTS).values(), ids=list(CALLS | BROADCASTS)
)


@pytest.fixture
def hub() -> Hub:
    return Hub(2, WAITED)


@pytest.fixture
def pair(hub: Hub) -> Iterator[list[Communicator]]:
    """Two ranks.  Afterwards nothing has been sent, and both still work."""
    with connected(hub=hub) as comms:
        sent = hub.posted["send"]
        yield comms
        assert hub.posted["send"] == sent
        for comm in comms:
            assert comm.ledger.snapshot().operations == ()
        receives = [comms[1].irecv(None, 0), comms[1].irecv_object(0)]
        comms[0].isend(torch.arange(3), 1)
        comms[0].isend_object("works", 1)
        assert receives[0].result(30).tolist() == [0, 1, 2]
        assert receives[1].result(30) == "works"


@every_call
@pytest.mark.parametrize("rank", [2, -1, True, False, 1.0, "1", None, 10**30, [1]])
def test_what_is_no_rank(call: Any, rank: Any, pair: list[Communicator]) -> None:
    with pytest.raises(CommError, match="is not a rank of this communicator") as caught:
        call(pair[0], rank)
    assert caught.value.kind is ErrorKind.CONFIG
    assert "0 to 1" in caught.value.cure


@point_to_point
def test_this_rank_itself(call: Any, pair: list[Communicator]) -> None:
    with pytest.raises(CommError, match="rank 0 is this rank itself") as caught:
        call(pair[0], 0)
    assert caught.value.kind is ErrorKind.CONFIG
    assert caught.value.cure


@pytest.mark.parametrize("tag", [-1, 65536, True, 1.0, "0", None, 10**30])
def test_what_is_no_tag(tag: Any, pair: list[Communicator]) -> None:
    for call in (lambda: pair[0].isend(ONE, 1, tag), lambda: pair[0].irecv(None, 1, tag=tag)):
        with pytest.raises(CommError, match="not an integer from 0 to 65535") as caught:
            call()
        assert caught.value.kind is ErrorKind.CONFIG


@pytest.mark.parametrize("name", ["side", "", None, 1, ["data"]])
def test_an_unknown_channel_names_the_known_ones(name: Any, pair: list[Communicator]) -> None:
    with pytest.raises(CommError, match="was not named when the ranks connected") as caught:
        pair[0].channel(name)
    assert caught.value.operation == f"channel {name!r}"
    assert "broadcast, control, data, fold" in caught.value.cure


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "8", [8]])
def test_what_is_no_declared_size(size: Any, pair: list[Communicator]) -> None:
    with pytest.raises(CommError, match="at_most is a positive number of bytes") as caught:
        pair[0].broadcast(ONE, 0, at_most=size)
    assert caught.value.kind is ErrorKind.CONFIG


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


UNSENDABLE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "nested": nested,
    "freed": lambda: without_memory(0),
    "shrunk": lambda: without_memory(16),
}
UNKNOWN = {
    "function": print,
    "object": object(),
    "generator": iter([1]),
    "module": torch,
    "array of objects": np.array([object()]),
}


@pytest.mark.parametrize("make", UNSENDABLE.values(), ids=UNSENDABLE)
def test_tensors_without_plain_memory(make: Any, pair: list[Communicator]) -> None:
    a, tensor = pair[0], make()
    for call in (
        lambda: a.isend(tensor, 1),
        lambda: a.isend_object([1, tensor], 1),
        lambda: a.isend_tensor_dict({"good": ONE, "bad": tensor}, 1),
        lambda: a.broadcast(tensor, 0),
        lambda: a.broadcast_tensor_dict({"bad": tensor}, 0),
    ):
        with pytest.raises(CommError) as caught:
            call()
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert "rank 1" in caught.value.operation
        assert caught.value.cure


@pytest.mark.parametrize("value", UNKNOWN.values(), ids=UNKNOWN)
def test_values_of_an_unknown_type(value: Any, pair: list[Communicator]) -> None:
    a = pair[0]
    for call in (
        lambda: a.isend_object([value], 1),
        lambda: a.isend_tensor_dict({"good": ONE, "bad": value}, 1),
        lambda: a.broadcast_object({"bad": value}, 0),
    ):
        with pytest.raises(CommError) as caught:
            call()
        assert caught.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize("value", [None, 1, "x", [ONE], {1: ONE}, {"a": 1, None: 2}])
def test_what_is_no_tensor_dict(value: Any, pair: list[Communicator]) -> None:
    a = pair[0]
    for call in (lambda: a.isend_tensor_dict(value, 1), lambda: a.broadcast_tensor_dict(value, 0)):
        with pytest.raises(CommError, match="keys are str") as caught:
            call()
        assert caught.value.kind is ErrorKind.CONFIG


@pytest.mark.parametrize("value", [None, 1, [ONE], np.ones(3), "x"])
def test_what_is_no_tensor(value: Any, pair: list[Communicator]) -> None:
    calls = [lambda: pair[0].isend(value, 1), lambda: pair[0].broadcast(value, 0)]
    if value is not None:
        calls += [lambda: pair[0].irecv(value, 1), lambda: pair[0].broadcast(value, 1)]
    for call in calls:
        with pytest.raises(CommError):
            call()


def overlapping() -> torch.Tensor:
    return torch.zeros(4).as_strided((3, 2), (1, 1))


UNFIT_TARGETS = UNSENDABLE | {
    "expanded": lambda: torch.zeros(1, 3).expand(4, 3),
    "overlapping": overlapping,
    "sub-byte": lambda: torch.empty(3, dtype=torch.uint4),
}


@pytest.mark.parametrize("make", UNFIT_TARGETS.values(), ids=UNFIT_TARGETS)
def test_what_cannot_be_received_into(make: Any, pair: list[Communicator]) -> None:
    target = make()
    for call in (lambda: pair[1].irecv(target, 0), lambda: pair[1].broadcast(target, 0)):
        with pytest.raises(CommError) as caught:
            call()
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        assert "rank 0" in caught.value.operation


def test_a_message_beyond_the_limit() -> None:
    with connected(max_message_bytes=100) as (a, b):
        for call in (
            lambda: a.isend(torch.ones(26), 1),
            lambda: a.isend(torch.ones(1).expand(1 << 40), 1),
            lambda: a.isend_tensor_dict({"x": [torch.ones(1).expand(1 << 40)]}, 1),
            lambda: a.isend_tensor_dict({"x": torch.ones(13), "y": torch.ones(13)}, 1),
            lambda: a.broadcast(torch.ones(26), 0),
        ):
            with pytest.raises(CommError, match="max_message_bytes = 100") as caught:
                call()
            assert caught.value.kind is ErrorKind.UNSUPPORTED
        receive = b.irecv(None, 0)
        a.isend(torch.ones(25), 1)
        assert receive.result(30).numel() == 25


def test_a_header_beyond_the_limit() -> None:
    with connected(max_header_bytes=4096) as (a, b):
        receive = b.irecv_tensor_dict(0)
        with pytest.raises(CommError, match="max_header_bytes = 4096") as caught:
            a.isend_tensor_dict(
                {str(i): ONE for i in range(300)} | {"x": [ONE + i for i in range(250)]}, 1
            )
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        a.isend_tensor_dict({"x": ONE}, 1)
        assert receive.result(30) == {"x": ONE}


# One rank alone


@point_to_point
@pytest.mark.parametrize("peer", [0, 1])
def test_a_group_of_one_rank_has_nobody_to_send_to(call: Any, peer: int) -> None:
    with connect_rank(Hub(1), 0) as comm, pytest.raises(CommError) as caught:
        call(comm, peer)
    assert caught.value.kind is ErrorKind.CONFIG


def test_a_broadcast_in_a_group_of_one_rank_does_nothing() -> None:
    with connect_rank(Hub(1), 0) as comm:
        assert comm.broadcast(ONE, 0) is ONE
        assert comm.broadcast_object("x", 0) == "x"
        assert comm.broadcast_tensor_dict({"x": 1}, 0) == {"x": 1}
        handle = comm.broadcast(ONE, 0, async_op=True)
        assert handle.is_completed()
        handle.wait(0)
        assert handle.result() is ONE
        comm.drain(0)


# After close


def finished(handle: Any) -> None:
    handle.wait(30)


@every_call
def test_use_after_close(call: Any) -> None:
    with connected() as (a, b):
        a.close(10)
        a.close(10)
        for _ in range(2):
            for comm, who in ((a, "rank 0 has closed it"), (b, "rank 0 has closed its")):
                with pytest.raises(CommError, match=who) as caught:
                    finished(call(comm, 1 - comm.rank))
                assert caught.value.kind is ErrorKind.CLOSED
                assert not isinstance(caught.value, CommTimeout)
        a.drain(0)
        assert "closed" in repr(a)


def test_a_second_close_releases_nothing_twice() -> None:
    hub = Hub(2)
    with connected(hub=hub) as (a, b):
        a.isend(torch.ones(5000), 1)
        for _ in range(3):
            with suppress(CommError):
                a.close(0.2)
        b.close(5)
    assert max(hub.closed.values()) == 1


def test_leaving_the_context_closes_and_keeps_the_callers_error() -> None:
    def use() -> None:
        with a:
            a.isend(torch.ones(5000), 1)
            raise ZeroDivisionError

    with connected(close_timeout=0.2) as (a, _):
        with pytest.raises(ZeroDivisionError):
            use()
        assert "closed" in repr(a)
