"""What may be left at quiescence of ranks that ran the library: nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer_testkit.sim.world import World

BOUNDS = {"max_inflight_ops": 8, "max_inflight_bytes": 1 << 20}
"""Small enough for a simulated rank to reach."""


class Leftovers:
    """Fails a schedule at whose end a send is counted, a byte retained or a source alive."""

    def __init__(self, world: World) -> None:
        self._communicators: list[Communicator] = []
        self._sources: list[weakref.ref[Any]] = []
        world.at_end(self._check)

    def communicator(self, communicator: Communicator) -> Communicator:
        """Watch `communicator`, its bounds included."""
        self._communicators.append(communicator)
        return communicator

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch `tensor`, which must have been freed by the end."""
        self._sources.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def _check(self) -> None:
        for communicator in self._communicators:
            snapshot, config = communicator.ledger.snapshot(), communicator.config
            rank, sends, nbytes = communicator.rank, snapshot.peak_sends, snapshot.peak_bytes
            assert snapshot.sends == 0, f"rank {rank} still counts {snapshot.sends} sends"
            assert snapshot.bytes == 0, f"rank {rank} still retains {snapshot.bytes} bytes"
            assert sends <= config.max_inflight_ops, f"rank {rank} had {sends} sends in flight"
            assert nbytes <= config.max_inflight_bytes, f"rank {rank} had {nbytes} bytes in flight"
        alive = sum(source() is not None for source in self._sources)
        assert alive == 0, f"{alive} source tensors are still alive"
