"""Random layouts of dense tensors: whatever torch makes of one piece of memory."""

from __future__ import annotations

import random

import torch
from bits import filled, same
from torch import Tensor

from commlayer.communicator import Communicator

NEGATABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
EXTENTS = (0, 1, 1, 2, 3, 5, 9)


def random_shape(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.choice(EXTENTS) for _ in range(rng.randrange(5)))


def random_view(rng: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `shape` whose elements do not overlap, anywhere in its storage.

    Dimensions are in any order with gaps of any size; strides of dimensions that
    nobody steps along are arbitrary.  Some are lazily conjugated or negated.
    """
    strides = [0] * len(shape)
    dense = rng.random() < 0.4
    step = 1 if dense else rng.randint(1, 3)
    order = list(range(len(shape)))
    if dense:
        order.reverse()
    else:
        rng.shuffle(order)
    empty = 0 in shape
    for dimension in order:
        extent = shape[dimension]
        if empty or extent == 1:
            strides[dimension] = rng.choice((0, 1, 2, 7, 77))
            continue
        strides[dimension] = step
        step *= extent * (1 if dense else rng.randint(1, 2))
    offset = rng.randrange(4)
    size = offset + 78 if empty else offset + step + 1
    negated = dtype in NEGATABLE and rng.random() < 0.2
    # Numbers, not any bits: torch negates a NaN to some NaN.
    base = torch.arange(size).to(dtype) if dtype in NEGATABLE else filled(dtype, size)
    view = base.as_strided(shape, strides, offset)
    if dtype in (torch.complex64, torch.complex128) and rng.random() < 0.3:
        view = view.conj()
    return torch._neg_view(view) if negated else view


def plain(view: Tensor) -> Tensor:
    """The values of `view` in memory of their own."""
    return view.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def exchange(comm: Communicator, trials: int, largest: int) -> None:
    """Rank 0 sends `trials` random layouts to rank 1, which receives each into another."""
    rng = random.Random(11)
    dtypes = (torch.float32, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)
    for trial in range(trials):
        shape = random_shape(rng)
        if trial % 3 == 0:
            shape = (largest, *shape[:1])
        dtype = rng.choice(dtypes)
        source, target = random_view(rng, dtype, shape), random_view(rng, dtype, shape)
        if comm.rank == 0:
            comm.isend(source, 1)
            comm.broadcast(source, 0, async_op=True)
            comm.isend_tensor_dict({"x": source}, 1)
            continue
        received = [comm.recv(target, 0)]
        received[0] = plain(received[0])
        received.append(plain(comm.broadcast(target.zero_(), 0)))
        received.append(comm.recv_tensor_dict(0)["x"])
        for one in received:
            if dtype in NEGATABLE:
                assert torch.equal(one, plain(source)), (trial, source.stride(), target.stride())
            else:
                assert same(one, plain(source)), (trial, source.stride(), target.stride())
