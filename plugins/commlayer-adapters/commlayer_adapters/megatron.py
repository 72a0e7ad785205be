"""Megatron-Core's pipeline communication over commlayer.

Replaced is ``P2PCommunicator._communicate``, through which all its ``send_*`` and
``recv_*`` go.  Sequence lengths that vary need no exchange of shapes and no
synchronisation of the device: the shape is in the message.  Collectives stay.

    p2p._communicate = Communicate(comm, config.pipeline_dtype, device)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from commlayer import Communicator, Handle

Result = tuple[Tensor | None, Tensor | None, dict[str, Handle] | None]


class Communicate:
    """Stands for ``_communicate``; the ranks of `comm` are those of the pipeline, in order.

    `variable` as ``config.variable_seq_lengths``.  Returned tensors require gradients.
    """

    def __init__(
        self, comm: Communicator, dtype: torch.dtype, device: torch.device, variable: bool = False
    ) -> None:
        self._comm, self._dtype, self._device, self._variable = comm, dtype, device, variable

    def __call__(
        self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, **asked: Any
    ) -> Result:
        """Takes what ``_communicate`` takes; returns tensors from previous and next, and handles.

        With ``wait_on_reqs`` (the default) everything is complete and there are no handles.
        """
        comm, handles = self._comm, dict[str, Handle]()
        previous, following = (comm.rank - 1) % comm.world_size, (comm.rank + 1) % comm.world_size
        got: dict[str, Tensor | None] = {"recv_prev": None, "recv_next": None}
        # Two tags: in a ring of two ranks, previous and next are the same rank.
        for name, peer, tag in (("recv_prev", previous, 1), ("recv_next", following, 2)):
            if asked[name]:
                if not self._variable:  # then the tensor exists before it arrives
                    shape = asked["tensor_shape"]
                    got[name] = torch.empty(*shape, dtype=self._dtype, device=self._device)
                handles[name] = comm.irecv(got[name], peer, tag)
        if tensor_send_next is not None:
            handles["send_next"] = comm.isend(tensor_send_next.detach(), following, 1)
        if tensor_send_prev is not None:
            handles["send_prev"] = comm.isend(tensor_send_prev.detach(), previous, 2)
        waits = asked.get("wait_on_reqs", True)
        for name in [n for n in handles if waits or (self._variable and n in got)]:
            result = handles.pop(name).result()
            got |= {name: result} if name in got else {}
        first, second = (None if t is None else t.requires_grad_() for t in got.values())
        return first, second, None if waits else handles
