"""Tensor dicts of which each rank of a group sends a slice.

The ranks of a tensor-parallel group hold equal copies of most tensors.  Each sends one part
to its counterpart in the next stage, and the receivers, a group themselves, give each other
theirs (`gather`).  Which tensor travels how is part of the message: a `Slice` in place of a
tensor.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About, CommError, ErrorKind
from commlayer.lanes.claims import MessageClaim
from commlayer.lanes.targets import Target
from commlayer.pipeline.exchange import Group
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.reader import Incoming
from commlayer.wire.tensors import bytes_of, sendable
from commlayer.wire.values import register

if TYPE_CHECKING:
    from commlayer.progress.operation import Operation

_WHOLE = CommConfig(max_message_bytes=sys.maxsize)
"""For tensors of which only a part is sent."""


@dataclass(frozen=True)
class Slice:
    """Part `index` of `parts` equal parts of the flattened tensor of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    index: int
    parts: int


register(Slice, "commlayer.Slice")


def sliced(
    tensors: Mapping[str, Any],
    replicated: Mapping[str, bool] | None,
    group: Group,
    operation: About,
) -> dict[str, Any]:
    """`tensors` with this rank's part in place of each tensor that can be sent in parts.

    Those are the dict's own dense tensors whose number of elements is a multiple
    of the group's size, unless `replicated` says False of them.
    """
    parts = group.world_size
    if not isinstance(replicated, Mapping | None):
        raise CommError(
            ErrorKind.CONFIG,
            operation,
            f"all_gather_tensors is a {type(replicated).__qualname__}",
            "Pass a dict of names, with False for what is not the same on all ranks of the group",
        )
    result = dict(tensors)
    for key, value in tensors.items():
        whole = (
            not isinstance(value, Tensor)
            or not (replicated or {}).get(key, True)
            or parts == 1
            or value.numel() == 0
            or value.numel() % parts
        )
        if not whole:
            flat = sendable(value, operation, _WHOLE).view(-1)
            size = flat.numel() // parts
            part = flat[group.rank * size : (group.rank + 1) * size]
            result[key] = Slice(part, tuple(value.shape), group.rank, parts)
    return result


def check_replicated(
    tensors: Mapping[str, Any],
    message: Mapping[str, Any],
    group: Group,
    channel: str,
    operation: About,
    config: CommConfig,
) -> None:
    """Raise (CONFIG), on every rank, if a tensor sent in parts is not the same on all of them.

    `message` is `tensors` after `sliced`.  Every rank of the group calls this in
    the same order; it waits for the others at most ``full_timeout`` seconds.
    """
    mine = {
        name: (str(tensors[name].dtype), value.shape, _checksum(tensors[name]))
        for name, value in message.items()
        if isinstance(value, Slice)
    }
    exchange = group._exchange
    key = exchange.key(("check", config.name, channel))
    exchange.post(key, mine)
    exchange.wait(key, config.full_timeout)
    everybody = exchange.peek(key)
    exchange.forget(key)
    for peer, theirs in everybody.items():
        if theirs == mine:
            continue
        if not isinstance(theirs, dict):
            raise protocol_error(operation, f"rank {peer} of all_gather_group sent no checksums")
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        raise CommError(
            ErrorKind.CONFIG,
            operation,
            f"{', '.join(map(repr, differing))} would be sent in parts, and is not the same on "
            f"ranks {group.rank} and {peer} of all_gather_group: it is not replicated",
            f"Say so on every rank: all_gather_tensors={{{differing[0]!r}: False}}",
        )


def _checksum(tensor: Tensor) -> int:
    host = sendable(tensor.detach().cpu(), "check_slices", _WHOLE)
    if host.nbytes == 0:
        return 0
    return zlib.crc32(bytes_of(host))


class WholeDictClaim(MessageClaim):
    """Asks for a tensor dict that must not have slices: there is no group to gather them with."""

    __slots__ = ()

    def __init__(self, operation: Operation, into: Mapping[str, Target] | None = None) -> None:
        super().__init__(operation, Kind.TENSOR_DICT, into=into)

    def value(self, incoming: Incoming) -> Any:
        value = super().value(incoming)
        for key, item in value.items():
            if isinstance(item, Slice):
                raise CommError(
                    ErrorKind.PROTOCOL,
                    self.operation.describe(),
                    f"the sender sent {key!r} as part {item.index} of {item.parts}, and this "
                    "receive has no all_gather_group",
                    "Receive with the group whose ranks get the other parts",
                )
        return value
