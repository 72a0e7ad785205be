"""What keeps a source alive and unchanged while it is sent."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, Communicator, ErrorKind, Handle

INLINE, LARGE = 16, 1 << 19

each_size = pytest.mark.parametrize("elements", [INLINE, LARGE], ids=["inline", "large"])
each_kind = pytest.mark.parametrize("kind", ["tensor", "object", "tensor_dict", "broadcast"])


def post(comm: Communicator, kind: str, tensor: torch.Tensor) -> Handle:
    """Post a send of `tensor` from rank 0 to rank 1."""
    if kind == "tensor":
        return comm.isend(tensor, 1)
    if kind == "object":
        return comm.isend_object(["x", tensor], 1)
    if kind == "tensor_dict":
        return comm.isend_tensor_dict({"x": 1, "t": tensor}, 1)
    handle: Handle = comm.broadcast(tensor, 0, async_op=True)
    return handle


def receive(comm: Communicator, kind: str) -> torch.Tensor:
    """Receive on rank 1 what `post` sends."""
    result: Any
    if kind == "tensor":
        result = comm.recv(None, 0)
    elif kind == "object":
        result = comm.recv_object(0)[1]
    elif kind == "tensor_dict":
        result = comm.recv_tensor_dict(0)["t"]
    else:
        result = comm.broadcast(None, 0)
    assert isinstance(result, torch.Tensor)
    return result


def overwrite_after_wait(kind: str, elements: int) -> None:
    comm = here.connect(check_lifetime=True)
    for step in range(4):
        if comm.rank == 0:
            tensor = torch.full((elements,), float(step))
            post(comm, kind, tensor).wait(20)
            tensor.fill_(-1.0)
        else:
            assert torch.equal(receive(comm, kind), torch.full((elements,), float(step)))
    comm.close()


@each_kind
def test_overwriting_after_wait_is_safe(ranks: Ranks, kind: str) -> None:
    ranks.run(overwrite_after_wait, 2, kind, LARGE)


def overwrite_before_wait(kind: str) -> str:
    comm = here.connect(check_lifetime=True)
    cause = ""
    if comm.rank == 0:
        tensor = torch.ones(LARGE)
        handle = post(comm, kind, tensor)
        tensor[LARGE // 2] = 7
        here.meet("overwritten")
        with pytest.raises(CommError) as caught:
            handle.wait(20)
        assert caught.value.kind is ErrorKind.LIFETIME
        with pytest.raises(CommError, match="overwritten"):
            handle.wait(20)
        cause = str(caught.value)
    else:
        here.meet("overwritten")
        receive(comm, kind)
    comm.close()
    return cause


@each_kind
def test_an_overwrite_in_flight_names_the_posting_line(ranks: Ranks, kind: str) -> None:
    message, _ = ranks.run(overwrite_before_wait, 2, kind)
    lines = open(__file__).read().splitlines()  # noqa: SIM115
    _, _, site = message.partition(f"posted at {__file__}:")
    assert "to rank 1" in message
    posting_line = lines[int(site.split(")")[0].split(",")[0]) - 1]
    assert "comm.isend" in posting_line or "comm.broadcast" in posting_line


def overwrite_a_copy(kind: str, elements: int) -> None:
    comm = here.connect(retention="copy_on_post", check_lifetime=True)
    if comm.rank == 0:
        tensor = torch.ones(elements)
        handle = post(comm, kind, tensor)
        tensor.fill_(-1.0)
        here.meet("overwritten")
        handle.wait(20)
    else:
        here.meet("overwritten")
        assert torch.equal(receive(comm, kind), torch.ones(elements))
    comm.close()


@each_kind
@each_size
def test_copy_on_post_delivers_the_bytes_at_post(ranks: Ranks, kind: str, elements: int) -> None:
    ranks.run(overwrite_a_copy, 2, kind, elements)


def drop_everything(elements: int) -> None:
    comm = here.connect()
    kinds = ["tensor", "object", "tensor_dict", "broadcast"]
    if comm.rank == 0:
        for kind in kinds:
            post(comm, kind, torch.full((elements,), 3.0))
        gc.collect()
        churned = [torch.full((elements,), -1.0) for _ in range(50)]
        del churned
        churned = [torch.full((elements,), -2.0) for _ in range(50)]
        here.meet("dropped and churned")
    else:
        handles = [comm.irecv(None, 0)]
        assert handles.pop() is not None  # its handle is dropped, the receive goes on
        gc.collect()
        here.meet("dropped and churned")
        for kind in kinds[1:]:
            assert torch.equal(receive(comm, kind), torch.full((elements,), 3.0))
    comm.close()


@each_size
def test_dropped_handles_and_sources_change_nothing(ranks: Ranks, elements: int) -> None:
    ranks.run(drop_everything, 2, elements)


def dropped_receive_fills_its_tensor() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    target = torch.zeros(LARGE)
    comm.irecv(target, peer)
    gc.collect()
    comm.isend(torch.ones(LARGE), peer)
    pause = threading.Event()
    while comm.ledger.snapshot().operations:
        pause.wait(0.01)
    assert torch.equal(target, torch.ones(LARGE))
    comm.close()


def test_a_dropped_receive_fills_its_tensor(ranks: Ranks) -> None:
    ranks.run(dropped_receive_fills_its_tensor, 2)


def source_lives_until_complete(kind: str) -> None:
    comm = here.connect()
    if comm.rank == 0:
        tensor = torch.full((LARGE,), 5.0)
        freed = threading.Event()
        weakref.finalize(tensor.untyped_storage(), freed.set)
        post(comm, kind, tensor)
        del tensor
        gc.collect()
        assert not freed.is_set()
        here.meet("dropped")
        assert freed.wait(20)
    else:
        here.meet("dropped")
        assert torch.equal(receive(comm, kind), torch.full((LARGE,), 5.0))
    here.meet("freed")
    comm.close()


@each_kind
def test_a_source_lives_until_its_send_completes_and_no_longer(ranks: Ranks, kind: str) -> None:
    ranks.run(source_lives_until_complete, 2, kind)
