"""Every dense layout is sent, received into, broadcast and carried in a dict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from bits import filled, same
from commlayer_testkit.local import connected
from torch import Tensor
from views import plain, random_shape, random_view

from commlayer.communicator import Communicator
from commlayer.wire.tensors import DTYPES

INLINE = 128
TRIALS = 10_000


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Communicator]]:
    with connected(inline_bytes=INLINE, check_lifetime=False) as comms:
        yield comms


def whole_storage(tensor: Tensor) -> list[int]:
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return flat.tolist()


def untouched(target: Tensor) -> Callable[[], bool]:
    """Whether bytes of the storage of `target` that are not its own stay as they are now."""
    itemsize = target.itemsize
    numbers = torch.arange(target.untyped_storage().nbytes() // itemsize)
    mine = numbers.as_strided(target.shape, target.stride(), target.storage_offset())
    own = {n * itemsize + byte for n in mine.flatten().tolist() for byte in range(itemsize)}
    before = whole_storage(target)
    return lambda: all(
        index in own or old == new
        for index, (old, new) in enumerate(zip(before, whole_storage(target), strict=True))
    )


COPIED = [dtype for name, dtype in DTYPES.items() if "float4" not in name]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.timeout(300)
def test_ten_thousand_layouts_of_source_and_target(pair: list[Communicator]) -> None:
    a, b = pair
    rng = random.Random(7)
    seen = {"inline": 0, "apart": 0, "empty": 0}
    for trial in range(TRIALS):
        dtype, shape = rng.choice(COPIED), random_shape(rng)
        source = random_view(rng, dtype, shape)
        target = random_view(rng, dtype, shape)
        expected = plain(source)
        size = expected.nbytes
        seen["empty" if size == 0 else "inline" if size <= INLINE else "apart"] += 1
        way = ("irecv", "new", "broadcast", "dict", "object")[trial % 5]
        intact = untouched(target) if trial % 7 == 0 else None
        if way == "irecv":
            a.isend(source, 1)
            received = b.irecv(target, 0).result(60)
            assert received is target
        elif way == "new":
            a.isend(source, 1)
            received = b.irecv(None, 0).result(60)
        elif way == "broadcast":
            a.broadcast(source, 0, async_op=True)
            received = b.broadcast(target, 0, async_op=True).result(60)
        elif way == "dict":
            a.isend_tensor_dict({"x": source}, 1)
            received = b.irecv_tensor_dict(0).result(60)["x"]
        else:
            a.isend_object([source, 1], 1)
            received = b.irecv_object(0).result(60)[0]
        where = (trial, way, dtype, shape, source.stride(), target.stride())
        if target.is_neg() or target.is_conj():  # torch negates zeros to either sign
            assert torch.equal(plain(received), expected), where
        else:
            assert same(plain(received), expected), where
        assert intact is None or intact(), where
    assert min(seen.values()) > TRIALS // 50, seen


ODD: dict[str, Callable[[], Tensor]] = {
    "last token of a batch of one": lambda: torch.arange(8.0).reshape(1, 8)[:, -1],
    "one element of many extents": lambda: torch.arange(9.0)[4:].as_strided((1, 1, 1), (7, 3, 5)),
    "one element, stride of zero": lambda: torch.arange(9.0)[4:].as_strided((1,), (0,)),
    "one wide element": lambda: torch.ones(1, 8, dtype=torch.complex128)[:, -1],
    "nothing, odd strides": lambda: torch.arange(9.0).as_strided((3, 0, 2), (1, 7, 5)),
    "nothing behind the end": lambda: torch.arange(9.0)[9:],
    "a row of one": lambda: torch.arange(600.0).reshape(1, 2, 300)[:, 1],
}


@pytest.mark.parametrize("rows", [1, 70], ids=["inline", "beside much"])
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_torch_calls_contiguous(
    make: Callable[[], Tensor], rows: int, pair: list[Communicator]
) -> None:
    a, b = pair
    source = make()
    assert source.is_contiguous()
    filler = torch.ones(rows)
    a.isend(source, 1)
    a.isend(source, 1)
    a.broadcast(source, 0, async_op=True)
    a.isend_tensor_dict({"filler": filler, "x": source}, 1)
    target, also = torch.zeros_like(make()), make()
    target = target.as_strided(source.shape, source.stride()) if source.numel() < 2 else target
    assert same(plain(b.recv(target, 0)), plain(source))
    assert same(plain(b.recv(also.zero_(), 0)), plain(source))
    assert same(plain(b.broadcast(make().zero_(), 0)), plain(source))
    assert same(b.recv_tensor_dict(0)["x"], plain(source))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_one_element_of_every_dtype(dtype: torch.dtype, pair: list[Communicator]) -> None:
    a, b = pair
    source = filled(dtype, 1, 8).as_strided((1,), (8,), 5)
    target = filled(dtype, 1, 8).as_strided((1,), (8,), 2)
    a.isend(source, 1)
    b.recv(target, 0)
    assert (
        whole_storage(target)[2 * dtype.itemsize : 3 * dtype.itemsize]
        == (whole_storage(source)[5 * dtype.itemsize : 6 * dtype.itemsize])
    )


@pytest.mark.parametrize("elements", [2, 500], ids=["inline", "large"])
@pytest.mark.parametrize("retention", ["hold_references", "copy_on_post"])
def test_lazy_views_are_written_through(elements: int, retention: str) -> None:
    with connected(inline_bytes=INLINE, retention=retention) as (a, b):
        values = torch.complex(torch.arange(float(elements)), torch.ones(elements))
        under = torch.zeros(elements, dtype=torch.complex64)
        a.isend(values, 1)
        b.recv(under.conj(), 0)
        assert torch.equal(under, values.conj().resolve_conj())
        real = torch.zeros(elements)
        a.broadcast(torch.arange(float(elements)), 0, async_op=True)
        b.broadcast(torch._neg_view(real), 0)
        assert torch.equal(real, -torch.arange(float(elements)))


@pytest.mark.parametrize("elements", [3, 500], ids=["inline", "large"])
@pytest.mark.parametrize("call", ["irecv", "broadcast"])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_autograd_notices_that_a_saved_tensor_was_received_into(
    layout: str, call: str, elements: int, pair: list[Communicator]
) -> None:
    a, b = pair
    x = torch.zeros(elements, requires_grad=True)
    saved = x * 2 if layout == "contiguous" else torch.stack((x, x), 1).mul(2)[:, 0]
    loss = (saved * saved).sum()
    if call == "irecv":
        a.isend(torch.full((elements,), 5.0), 1)
        b.irecv(saved.detach(), 0).result(60)
    else:
        a.broadcast(torch.full((elements,), 5.0), 0, async_op=True)
        b.broadcast(saved.detach(), 0, async_op=True).result(60)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
