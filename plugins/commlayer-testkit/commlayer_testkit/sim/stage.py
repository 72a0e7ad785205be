"""What a play of ranks that run the library works with, and what it must leave behind: nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer_testkit.sim.mount_core import connect
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.world import World

BOUNDS = {"max_inflight_ops": 8, "max_inflight_bytes": 1 << 20}
"""Small enough for a simulated rank to reach."""


class Stage:
    """One execution: connects ranks, makes tensors where the world's transport reads them.

    A schedule fails at whose end a send is counted, a byte retained or a source
    alive.  `connected` connects a rank, by default on the world's own transport;
    `on_device` says that this is one of devices.
    """

    def __init__(
        self,
        world: World,
        connected: Callable[..., Communicator] = connect,
        *,
        on_device: bool = False,
    ) -> None:
        self.world = world
        self.on_device = on_device
        self._connected = connected
        self._communicators: list[Communicator] = []
        self._sources: list[weakref.ref[Any]] = []
        world.at_end(self._check)

    def connect(self, rank: Rank, **config: Any) -> Communicator:
        """Connect a rank; bounded to 8 operations unless `config` says otherwise."""
        communicator = self._connected(rank, **{**BOUNDS, **config})
        self._communicators.append(communicator)
        return communicator

    def source(self, rank: Rank, value: int, nbytes: int = 16) -> torch.Tensor:
        """A tensor of that value in every byte, which must be freed at the end."""
        tensor = (rank.arena.full if self.on_device else filled)(value, nbytes)
        self._sources.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    def target(self, rank: Rank, nbytes: int = 16) -> torch.Tensor:
        """A tensor to receive into."""
        return rank.arena.empty(nbytes) if self.on_device else blank(nbytes)

    def overwrite(self, rank: Rank, tensor: torch.Tensor, value: int) -> None:
        """Write `value` into a tensor, as work of the current stream where there is one."""
        if self.on_device:
            rank.device.launch("overwrite", lambda data: data.fill_(value), writes=[tensor])
        else:
            tensor.fill_(value)

    def expect(self, rank: Rank, tensor: torch.Tensor, value: int) -> None:
        """Use a result: every byte must be `value`."""

        def look(data: torch.Tensor) -> None:
            found = data.tolist()
            assert found == [value] * len(found), f"expected {value} everywhere, got {found}"

        if self.on_device:
            rank.device.launch("use", look, reads=[tensor])
        else:
            look(tensor)

    def settle(self, rank: Rank) -> None:
        """Wait for what was given to the rank's device; done for every rank whose body returns."""
        if self.on_device:
            rank.device.synchronize()

    def start(self, body: Callable[[Stage, Rank], object], size: int) -> None:
        """Have `size` ranks play ``body(stage, rank)``."""

        def play(rank: Rank) -> None:
            body(self, rank)
            self.settle(rank)

        self.world.start(size, play)

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
