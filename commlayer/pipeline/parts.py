"""Tensor dicts that the ranks of a group send, or receive, in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlayer.config import CommConfig
from commlayer.errors import ConfigError
from commlayer.handle import Handle
from commlayer.lanes.claims import MessageClaim
from commlayer.lanes.encode import as_dict
from commlayer.lanes.posting import Posting
from commlayer.pipeline.exchange import checked_group
from commlayer.pipeline.gather import GatherHandle
from commlayer.pipeline.slices import check_replicated, sliced
from commlayer.wire.frame import Kind

if TYPE_CHECKING:
    from commlayer.device.side import DeviceSide


def send_parts(
    posting: Posting,
    config: CommConfig,
    channel: str,
    tensor_dict: Mapping[str, Any],
    dst: int,
    tag: int,
    group: Any,
    tensors: Mapping[str, bool] | None,
) -> Handle[None]:
    """Post a send of this rank's part of `tensor_dict`; see `Communicator.isend_tensor_dict`."""
    call = "isend_tensor_dict"
    group = checked_group(group, call)
    operation = posting.operation(call, dst, "send", Kind.TENSOR_DICT, tag)
    whole = as_dict(tensor_dict, operation)
    where = operation.describe()
    value = sliced(whole, tensors, group.rank, group.world_size, where)
    if config.check_slices:
        check_replicated(whole, value, group, channel, where, config)
    return posting.send(call, Kind.TENSOR_DICT, value, dst, tag)


def receive_parts(
    posting: Posting,
    config: CommConfig,
    channel: str,
    src: int,
    tag: int,
    group: Any,
    device: DeviceSide | None,
    into: object,
) -> Handle[dict[str, Any]]:
    """Post a receive that gathers the parts; see `Communicator.irecv_tensor_dict`."""
    call = "irecv_tensor_dict"
    group = checked_group(group, call)
    operation = posting.operation(call, src, "recv", Kind.TENSOR_DICT, tag)
    if into is not None:
        raise ConfigError(
            operation.describe(),
            "slices are gathered into new memory, into is for whole tensors",
            "Pass into or all_gather_group",
        )
    return GatherHandle(
        posting.receive_claim(MessageClaim(operation, Kind.TENSOR_DICT)),
        group,
        ("gather", config.name, channel),
        operation.lane,
        operation.describe(),
        None if device is None else device.device,
    )
