"""Groups of ``torch.distributed``: who is a member, and which of the groups of the same it is."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commlayer.bootstrap.launch import refusal

_CURE = (
    "Pass a group of init_process_group() or new_group(), a DeviceMesh or a dimension of one, or "
    "rank=, world_size= and store="
)


def members_of(group: Any) -> tuple[list[int], str]:
    """The global ranks of a group or mesh, in its order, and its name.

    Groups of the same members have different names, which all ranks know alike.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim > 1:
            ranks: list[int] = group.mesh.flatten().tolist()
            return ranks, f"mesh {group.mesh_dim_names} {tuple(group.shape)}"
        group = _of_dimension(group)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return [], ""
    if not isinstance(group, dist.ProcessGroup):
        raise refusal(f"group = {group!r} is no group of torch.distributed", _CURE)
    try:
        return dist.get_process_group_ranks(group), f"group {group.group_name}"
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise refusal(
            f"torch.distributed does not know the ranks of the group {group!r}", _CURE
        ) from error


def _of_dimension(mesh: DeviceMesh) -> Any:
    try:
        return mesh.get_group()
    except (KeyError, RuntimeError, TypeError) as error:
        raise refusal(f"the mesh {mesh!r} has no group ({error})", _CURE) from error
