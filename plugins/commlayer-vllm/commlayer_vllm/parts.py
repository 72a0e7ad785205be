"""Tensors of which each rank of the tensor-parallel group sends a part.

The part says so on the wire: the receiver decides nothing.  The engine's own
collective puts the parts together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commlayer.errors import CommError, ErrorKind
from commlayer.wire.values import register


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of the flattened tensor of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    count: int


register(Part, "commlayer_vllm.Part")


def sent_in_parts(
    key: str, tensor: Tensor, group: Any, replicated: Mapping[str, bool] | None
) -> bool:
    """Whether the engine sends `tensor` in parts over `group` (its tensor-parallel group).

    By default each tensor whose number of elements is a multiple of the group's
    size; `replicated`, the engine's ``all_gather_tensors``, overrides that.
    """
    if group is None or group.world_size == 1 or tensor.numel() == 0:
        return False
    divisible = tensor.numel() % group.world_size == 0
    return divisible if replicated is None else replicated.get(key, divisible)


def part_of(tensor: Tensor, group: Any) -> Tensor:
    """This rank's part of `tensor`, flat."""
    return tensor.reshape(group.world_size, -1)[group.rank_in_group]


def join(key: str, part: Tensor, shape: tuple[int, ...], group: Any) -> Tensor:
    """The whole tensor: a collective of `group`, entered by all its ranks in one order."""
    if group is None or part.numel() * group.world_size != math.prod(shape):
        size = "none" if group is None else group.world_size
        raise CommError(
            ErrorKind.CONFIG,
            "irecv_tensor_dict",
            f"{key!r} of shape {list(shape)} came as a part of {part.numel()} elements, and the "
            f"size of all_gather_group here is {size}",
            "Use tensor-parallel groups of one size at both ends",
        )
    whole: Tensor = group.all_gather(part, dim=0)
    return whole.reshape(shape)
