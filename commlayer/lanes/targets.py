"""Memory of the caller's that tensors are received into."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from commlayer.wire.frame import Placement
from commlayer.wire.tensors import (
    TensorMeta,
    as_bytes,
    has_memory,
    is_lazy_view,
    meta_of,
    plain_alias,
)


class Target:
    """A dense tensor that one of a message is received into, or into the first part of which.

    The message's tensor has as many elements as this one, in any shape, or fewer: then
    the result is a view of the first elements of a contiguous target, or of the first
    rows of one with the same rows.  One on a device comes with the device's `copy`.
    """

    __slots__ = ("_by_bytes", "_copy", "_given", "_memory")

    def __init__(self, given: Tensor, copy: Callable[[Tensor, Tensor], object] | None) -> None:
        self._given = given
        # An alias: the caller's tensor may get other memory (`tensor.data = ...`) meanwhile.
        self._memory = memory = plain_alias(given).detach()
        self._by_bytes = memory.is_contiguous() and not is_lazy_view(memory)
        self._copy = copy

    def misfit(self, sent: TensorMeta, place: int) -> str:
        """Why a tensor that travels at `place` cannot be received into it; empty if it can."""
        mine = meta_of(self._memory)
        if sent.dtype != mine.dtype or not self._holds(sent):
            return (
                f"the peer sent {sent.dtype} of shape {list(sent.shape)}, this rank's tensor "
                f"is {mine.dtype} of shape {list(mine.shape)}"
            )
        on_device = self._copy is not None
        if place and (place >= Placement.DEVICE) is not on_device:
            where = ("host", "device") if on_device else ("device", "host")
            return (
                f"the peer sent a tensor in {where[0]} memory, this rank's is in {where[1]} memory"
            )
        return ""

    def _holds(self, sent: TensorMeta) -> bool:
        sent_numel, numel = math.prod(sent.shape), self._memory.numel()
        if sent_numel == numel or (sent_numel < numel and self._memory.is_contiguous()):
            return True
        return sent_numel < numel and sent.shape[1:] == self._memory.shape[1:] != sent.shape

    @property
    def lost(self) -> bool:
        """Whether its memory is gone, or too small for it now."""
        return not has_memory(self._memory)

    def buffer(self, sent: TensorMeta) -> Tensor | None:
        """The bytes to receive the message's tensor into; ``None`` where it has to be copied."""
        if not self._by_bytes or self.lost:
            return None
        return as_bytes(self._memory)[: sent.nbytes]

    def write(self, tensor: Tensor | None, sent: TensorMeta) -> Tensor:
        """Copy `tensor`, unless it is ``None``: received already; returns what the caller gets."""
        part = self._part(sent)
        if tensor is not None and tensor.numel():
            copy = self._copy or Tensor.copy_
            with torch.inference_mode():
                if self._by_bytes:  # torch 2.8 cannot copy every dtype
                    copy(as_bytes(part), as_bytes(tensor))
                else:
                    copy(part, tensor.view(part.shape))
        if not self._memory.is_inference():
            # As an in-place operation does, so that autograd refuses a value it saved before.
            increment_version(self._memory)
        return self._given if part is self._memory else part

    def _part(self, sent: TensorMeta) -> Tensor:
        numel = math.prod(sent.shape)
        if numel == self._memory.numel():
            return self._memory
        if self._memory.is_contiguous():
            return self._memory.view(-1)[:numel].view(sent.shape)
        return self._memory[: sent.shape[0]]
