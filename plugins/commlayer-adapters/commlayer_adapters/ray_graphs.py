"""Ray's compiled graphs over commlayer: a communicator for ``with_tensor_transport``.

Replaced are ``send`` and ``recv`` between actors.  From Ray's communicator for hosts, the
base, stay the book-keeping of actors and ``allreduce``.
"""

from __future__ import annotations

from typing import Any

import torch
from ray.exceptions import RayChannelError
from ray.experimental.channel import CPUCommunicator
from torch._C._distributed_c10d import TCPStore

import commlayer


class CommlayerCommunicator(CPUCommunicator):  # type: ignore[misc]
    """Ranks are `actors` in order; rank 0 opens the store at `address`, a host and a free port."""

    recv_stream = send_stream = None  # `wait` orders the stream that is current

    def __init__(self, actors: list[Any], address: tuple[str, int], **config: Any) -> None:
        super().__init__(len(actors), actors)
        self._address, self._config = address, config
        self._comm: commlayer.Communicator | None = None

    def initialize(self, rank: int) -> None:
        super().initialize(rank)
        size = self.get_world_size()
        store = TCPStore(*self._address, size, rank == 0, wait_for_workers=False)
        self._comm = commlayer.connect(self._config, rank=rank, world_size=size, store=store)

    def send(self, tensor: torch.Tensor, peer_rank: int) -> None:
        """Post a send; `tensor` is kept until it has left."""
        self._open().isend(tensor, peer_rank)

    def recv(self, shape: Any, dtype: Any, peer_rank: int, allocator: Any = None) -> Any:
        """Receive a tensor that may be read from any stream."""
        into = None if allocator is None else allocator(shape, dtype)
        try:
            handle = self._open().irecv(into, peer_rank)
            handle.synchronize()
            return handle.result()
        except commlayer.CommError as error:
            raise RayChannelError(str(error)) from error

    def destroy(self) -> None:
        super().destroy()
        if self._comm is not None:
            self._comm.close()

    def get_transport_name(self) -> str:
        return "accelerator"  # to Ray: whatever goes through send() and recv()

    def _open(self) -> commlayer.Communicator:
        if self._comm is None:
            raise RayChannelError("initialize() was not called, or destroy() was")
        return self._comm
