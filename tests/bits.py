"""Tensors of every dtype that are told apart bit by bit, also where their dtype has no equality."""

from __future__ import annotations

import torch
from torch import Tensor

from commlayer.wire.tensors import as_bytes


def filled(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor whose bytes differ from place to place."""
    tensor = torch.empty(shape, dtype=dtype)
    as_bytes(tensor).copy_(torch.arange(tensor.nbytes) % (2 if dtype is torch.bool else 251))
    return tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and bytes are equal, whatever the strides."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
        as_bytes(a.detach().contiguous()), as_bytes(b.detach().contiguous())
    )


def without_memory(nbytes: int) -> torch.Tensor:
    """Three floats, the third to the fifth of a storage that has only `nbytes` left."""
    tensor = torch.arange(5.0)
    view = tensor[2:]
    tensor.untyped_storage().resize_(nbytes)
    return view
