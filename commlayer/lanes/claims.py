"""Receives that were asked for: what they accept and what they yield."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation
from commlayer.wire.frame import Kind, Placement
from commlayer.wire.reader import Incoming
from commlayer.wire.tensors import as_bytes, has_memory, is_lazy_view, meta_of, plain_alias

_CALLS = {
    Kind.TENSOR: "a tensor",
    Kind.OBJECT: "an object",
    Kind.TENSOR_DICT: "a tensor dict",
}


class MessageClaim:
    """Asks a lane for the next message, which must be of one kind and of one collective step.

    With `target` (a dense tensor) the message must be a tensor of its dtype and
    number of elements, and is received into it; without, into new memory.  A
    `target` on a device comes with the device's `copy`.  `at_most` is the size in
    bytes that the sender must have declared for the tensor, too.
    """

    __slots__ = (
        "_by_bytes",
        "_copy",
        "_kind",
        "_result",
        "_step",
        "_target",
        "at_most",
        "operation",
    )

    def __init__(
        self,
        operation: Operation,
        kind: Kind,
        step: int = -1,
        target: Tensor | None = None,
        copy: Callable[[Tensor, Tensor], object] | None = None,
        at_most: int = -1,
    ) -> None:
        self.operation = operation
        self.at_most = at_most
        self._kind = kind
        self._step = step
        self._result = target
        self._target = into = None if target is None else plain_alias(target).detach()
        self._by_bytes = into is not None and into.is_contiguous() and not is_lazy_view(into)
        self._copy = copy

    @property
    def copies(self) -> bool:
        return self._target is not None

    def refusal(self, incoming: Incoming) -> CommError | None:
        if incoming.kind is not self._kind:
            what = _CALLS.get(incoming.kind, "a message of the library's own")
            return self._mismatch(f"the peer sent {what}, this rank receives {_CALLS[self._kind]}")
        if incoming.step != self._step:
            theirs, ours = _broadcast(incoming.step), _broadcast(self._step)
            if incoming.step >= 0:
                ours = ours.removeprefix("broadcast ")
            return self._mismatch(f"the peer is at {theirs} of this channel, this rank at {ours}")
        if incoming.body.at_most != self.at_most:
            return self._mismatch(
                f"the peer declared {_size(incoming.body.at_most)}, this rank {_size(self.at_most)}"
            )
        size = incoming.schema.nbytes
        if size > self.at_most >= 0:
            return self._mismatch(f"the peer sent {size} bytes and declared {self.at_most}")
        if self._target is not None:
            sent, mine = incoming.body.tensors[0], meta_of(self._target)
            if sent.dtype != mine.dtype or sent.nbytes != mine.nbytes:
                return self._mismatch(
                    f"the peer sent {sent.dtype} of shape {list(sent.shape)}, this rank's tensor "
                    f"is {mine.dtype} of shape {list(mine.shape)}"
                )
            place = incoming.body.placements[0]
            if place and (place >= Placement.DEVICE) is not (self._copy is not None):
                where = ("host", "device") if self._copy is not None else ("device", "host")
                return self._mismatch(
                    f"the peer sent a tensor in {where[0]} memory, this rank's is in "
                    f"{where[1]} memory"
                )
            if not has_memory(self._target):
                return self._lost()
        return None

    def _lost(self) -> CommError:
        return CommError(
            ErrorKind.UNSUPPORTED,
            self.operation.describe(),
            "the tensor to receive into has lost its memory (its storage was freed or shrunk) "
            "since the receive was posted",
            "Keep its storage until the handle was waited; this message is lost, later ones are "
            "not",
        )

    def _mismatch(self, cause: str) -> CommError:
        return CommError(
            ErrorKind.PROTOCOL,
            self.operation.describe(),
            cause,
            "Make both ranks call the same operations in the same order; this message is lost, "
            "later ones are not",
        )

    def buffer(self, incoming: Incoming, index: int) -> Tensor | None:
        return as_bytes(self._target) if self._target is not None and self._by_bytes else None

    def value(self, incoming: Incoming) -> Any:
        if incoming.parsed is not None:
            return incoming.parsed.build(
                [t for t in incoming.tensors if t is not None], self.operation
            )
        tensor = incoming.tensors[0]
        if self._target is None:
            return tensor
        # Once more, because payload may have been long under way.
        if not has_memory(self._target):
            raise self._lost()
        if tensor is not None and tensor.numel():
            copy = self._copy or Tensor.copy_
            with torch.inference_mode():
                if self._by_bytes:  # torch 2.8 cannot copy every dtype
                    copy(as_bytes(self._target), as_bytes(tensor))
                else:
                    copy(self._target, tensor.view(self._target.shape))
        if not self._target.is_inference():
            # As an in-place operation does, so that autograd refuses a value it saved before.
            increment_version(self._target)
        return self._result


def _size(at_most: int) -> str:
    return "no size" if at_most < 0 else f"at_most = {at_most}"


def _broadcast(step: int) -> str:
    return f"broadcast {step}" if step >= -1 else f"step {-2 - step}"
