"""A program that uses commlayer, as its author would type it.  Checked, never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import commlayer
from commlayer.backend import Backend, Endpoint, Transport, Viability, World
from commlayer.pipeline.deferred import DeferredBroadcast
from commlayer.pipeline.loop import StageLoop
from commlayer.pipeline.topology import FoldedTopology
from commlayer.semantics import OperationSemantics, Poll


def stage(comm: commlayer.Communicator, hidden: Tensor) -> dict[str, Any]:
    sent: commlayer.Handle = comm.isend(hidden, 1, tag=3)
    sent.wait(timeout=1.0)
    done: bool = sent.is_completed()
    error: commlayer.CommError | None = sent.exception()
    if done and error is not None:
        raise error
    received: dict[str, Any] = comm.recv_tensor_dict(src=1)
    pending: commlayer.Handle = comm.broadcast(hidden, 0, async_op=True)
    pending.synchronize()
    with comm.side_stream(uses=[hidden]) as side:
        side.broadcast_object({"step": 1}, src=0, async_op=True)
    fold: commlayer.Communicator = comm.channel("fold")
    fold.drain(timeout=None)
    print(comm.ledger.snapshot().bytes, comm.report().case)
    return received


class Counting:
    name = "counting"
    requires: Mapping[str, Sequence[Any]] = {}

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


class Mine(Backend):
    name = "mine"
    plugin_api = (1, 1)
    semantics = commlayer.Semantics(p2p=OperationSemantics(poll=Poll.EXACT), tags=True)

    def viability(self) -> Viability:
        return Viability(True, "always")

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return Rail(world)


class Rail(Transport):
    def __init__(self, world: World) -> None:
        self.rank: int = world.rank

    def endpoint(self, name: str) -> Endpoint:
        raise NotImplementedError


@commlayer.hookimpl
def commlayer_backend() -> Backend:
    return Mine()


def main() -> None:
    policy: commlayer.RetentionPolicy = Counting()
    config = commlayer.CommConfig(backend="gloo", max_inflight_ops=10)
    with commlayer.connect(config, retention=policy) as comm:
        loop: StageLoop[int] = StageLoop(comm, FoldedTopology(2), lambda batch, v, activation: {})
        loop.submit(1)
        tokens = DeferredBroadcast(comm.channel("broadcast"), src=0, name="tokens")
        tokens.post(0, torch.zeros(1) if comm.rank == 0 else None)
        try:
            stage(comm, torch.zeros(4))
        except commlayer.CommTimeout as error:
            print(error.kind is commlayer.ErrorKind.TIMEOUT, error.peer)
