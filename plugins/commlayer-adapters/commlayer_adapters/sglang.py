"""SGLang's pipeline loop over commlayer: ``point_to_point_pyobj`` and ``pp_group``'s tensor dicts.

Requests, proxy tensors and outputs get a tag each, so a receiver takes the kind that it
wants and needs no inbox that sorts by ``__msg_type__``.  Requests hold plain classes:
register them (`commlayer.register`), or set ``allow_pickle``.  Broadcasts stay with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from commlayer import Communicator, Handle

_REQUESTS = 1
_TAGS = {"default": 0, "proxy": 2, "output": 3}
"""A tag for each ``__msg_type__``."""


class P2PWork(NamedTuple):
    """What the loop waits for: ``work.wait()``.  The library keeps the payload."""

    work: Handle
    payload: None = None


class PipelineGroup:
    """Stands for ``pp_group`` where the loop sends and receives: a ring in rank order."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank_in_group, self.world_size = comm, comm.rank, comm.world_size
        self.is_first_rank, self.is_last_rank = comm.rank == 0, comm.rank == comm.world_size - 1

    def send_tensor_dict(
        self, tensor_dict: dict[str, Any], all_gather_group: Any = None, async_send: bool = False
    ) -> list[P2PWork]:
        """Send to the next rank; the type of the message picks its lane."""
        contents = {k: v for k, v in tensor_dict.items() if k != "__msg_type__"}
        tag = _TAGS[tensor_dict.get("__msg_type__", "default")]
        peer = (self.comm.rank + 1) % self.world_size
        handle = self.comm.isend_tensor_dict(contents, peer, all_gather_group, tag=tag)
        if not async_send:
            handle.wait()
        return [P2PWork(handle)]

    def recv_tensor_dict(self, all_gather_group: Any = None, kind: str = "default") -> Any:
        """Receive a dict of one type from the previous rank."""
        peer = (self.comm.rank - 1) % self.world_size
        return self.comm.recv_tensor_dict(peer, all_gather_group, tag=_TAGS[kind])

    def point_to_point_pyobj(
        self, data: Any, rank: int, group: Any = None, src: int = 0, dst: int = 1, **how: bool
    ) -> Any:
        """Send `data` on `src`, receive it on `dst`; with ``async_send=True``, return works."""
        if rank == src:
            handle = self.comm.isend_object(data, dst, tag=_REQUESTS)
            return [P2PWork(handle)] if how.get("async_send") else handle.wait()
        return self.comm.recv_object(src, tag=_REQUESTS) if rank == dst else data
