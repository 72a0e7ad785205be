"""Tensor dicts of which each rank of a group sends a slice.

The ranks of a tensor-parallel group hold equal copies of most tensors.  Each sends one part
to its counterpart in the next stage, and the receivers, a group themselves, put the parts
together: over a communicator in the wait (`gather`), or by a collective of an engine where
the engine calls it (`receive_slices`, `gather_slices`).  Which tensor travels how is part of
the message: a `Slice` in place of a tensor.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import About, CommError, ErrorKind
from commlayer.handle import Handle
from commlayer.lanes.claims import MessageClaim
from commlayer.lanes.posting import Posting
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
    index: int,
    parts: int,
    operation: About = "isend_tensor_dict",
) -> dict[str, Any]:
    """`tensors` with part `index` of `parts` in place of each tensor that can be sent in parts.

    Those are the dict's own dense tensors whose number of elements is a multiple
    of `parts`, unless `replicated` says False of them.
    """
    if not isinstance(replicated, Mapping | None):
        raise CommError(
            ErrorKind.CONFIG,
            operation,
            f"all_gather_tensors is a {type(replicated).__qualname__}",
            "Pass a dict of names, with False for what is not the same on all ranks of the group",
        )
    result = dict(tensors)
    for key, value in tensors.items():
        if isinstance(value, Tensor) and divides(key, value, parts, replicated):
            part = part_of(value, index, parts, operation)
            result[key] = Slice(part, tuple(value.shape), index, parts)
    return result


def divides(key: str, tensor: Tensor, parts: int, replicated: Mapping[str, bool] | None) -> bool:
    """Whether `sliced` sends a part of `tensor`, the entry `key` of a dict."""
    wanted = parts > 1 and (replicated or {}).get(key, True)
    return bool(wanted) and tensor.numel() > 0 and tensor.numel() % parts == 0


def part_of(
    tensor: Tensor, index: int, parts: int, operation: About = "isend_tensor_dict"
) -> Tensor:
    """Part `index` of `parts` equal ones of `tensor`, flat."""
    return sendable(tensor, operation, _WHOLE).view(parts, -1)[index]


class _Posts(Protocol):
    """What `receive_slices` needs of a communicator."""

    @property
    def _posting(self) -> Posting: ...


def receive_slices(comm: _Posts, src: int, tag: int = 0) -> Handle[dict[str, Any]]:
    """`Communicator.irecv_tensor_dict`, with every `Slice` left to `gather_slices`."""
    return comm._posting.receive("irecv_tensor_dict", Kind.TENSOR_DICT, src, tag)


def gather_slices(
    value: dict[str, Any],
    parts: int,
    all_gather: Callable[[Tensor], Tensor],
    operation: About = "irecv_tensor_dict",
) -> None:
    """Replace every `Slice` of `value`, a received dict, by the whole tensor.

    `all_gather` gets this rank's part, flat, and returns those of all `parts` ranks, flat and
    in their order; a group of one rank needs none.  All ranks call this for the same messages in
    the same order.  Raises PROTOCOL or CONFIG, before anything is gathered, for slices that cannot
    be put together.
    """
    slices = slices_in(value, parts, operation)
    for key, item in slices.items():
        flat = item.tensor if parts == 1 else all_gather(item.tensor)
        value[key] = flat.reshape(item.shape)


def slices_in(value: Mapping[str, Any], parts: int, operation: About) -> dict[str, Slice]:
    """The slices of a received dict; raises unless they add up in a group of `parts` ranks."""
    slices = {key: item for key, item in value.items() if isinstance(item, Slice)}
    for key, item in slices.items():
        checked_slice(key, item, operation)
        if item.parts != parts:
            raise CommError(
                ErrorKind.CONFIG,
                operation,
                f"the sender sent {key!r} in {item.parts} parts, and all_gather_group has "
                f"{parts} {'rank' if parts == 1 else 'ranks'} here",
                "Use groups of one size at both ends, or mark the tensor as not replicated: "
                f"all_gather_tensors={{{key!r}: False}}",
            )
    return slices


def checked_slice(key: str, item: Any, operation: About) -> Slice:
    """Return `item`, which a peer sent; raises (PROTOCOL) unless it is a slice that adds up."""
    if not (
        isinstance(item, Slice)
        and isinstance(item.tensor, Tensor)
        and isinstance(item.shape, tuple)
        and all(type(number) is int and number > 0 for number in (*item.shape, item.parts))
        and type(item.index) is int
        and 0 <= item.index < item.parts
        and math.prod(item.shape) == item.tensor.numel() * item.parts
    ):
        raise protocol_error(operation, f"slice {key!r} contradicts itself")
    return item


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
