"""commlayer itself, in its two wait modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commlayer.config import CommConfig
from commlayer_bench.contender import Contender, Finish, Kind, Unavailable, Way

if TYPE_CHECKING:
    from commlayer.communicator import Communicator

BACKEND = "gloo"
IN_FLIGHT = 1 << 20
"""Bound on operations, above what any workload posts."""

MODES: Mapping[str, Mapping[str, Any]] = {
    "commlayer": {},
    "commlayer direct": {"wait_mode": "direct"},
}
"""What the contenders of this module set, by name."""


def known(name: str) -> bool:
    """Whether this commlayer has all the keys that the contender sets."""
    return MODES[name].keys() <= set(CommConfig.__struct_fields__)


def settings(name: str) -> dict[str, Any]:
    """The configuration of a contender.  Raises `Unavailable` where a key is unknown."""
    if not known(name):
        keys = ", ".join(MODES[name].keys() - set(CommConfig.__struct_fields__))
        raise Unavailable(f"this commlayer has no configuration key {keys}")
    return {"backend": BACKEND, "name": name, "max_inflight_ops": IN_FLIGHT, **MODES[name]}


def connect(name: str) -> Contender:
    from commlayer.bootstrap import connector

    comm = connector.connect(settings(name))
    return Contender(name, ways(comm), close=comm.close)


def ways(comm: Communicator) -> Mapping[Kind, Way]:
    """How a communicator sends each kind of message."""

    def broadcast(tensor: Any, src: int) -> Finish:
        return comm.broadcast(tensor, src, async_op=True).result  # type: ignore[no-any-return]

    return {
        "tensor": Way(
            lambda value, dst: comm.isend(value, dst).wait,
            lambda like, src: comm.irecv(None, src).result,
        ),
        "object": Way(
            lambda value, dst: comm.isend_object(value, dst).wait,
            lambda like, src: comm.irecv_object(src).result,
        ),
        "dict": Way(
            lambda value, dst: comm.isend_tensor_dict(value, dst).wait,
            lambda like, src: comm.irecv_tensor_dict(src).result,
        ),
        "broadcast": Way(broadcast, lambda like, src: broadcast(None, src)),
    }
