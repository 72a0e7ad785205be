"""commlayer between two devices, one for each rank of a run."""

from __future__ import annotations

from typing import Any

import pytest
from commlayer_gloo import GlooBackend
from commlayer_nccl import NcclBackend
from devices.tensors import full, take_device, value
from ranks import here
from standin import controls

import commlayer
from commlayer.communicator import Communicator
from commlayer.registry import Registry

needs_stand_in = pytest.mark.skipif(
    not controls.loaded(), reason="counts or breaks what only the stand-in lets it: make test-cuda"
)


def connect(**settings: Any) -> Communicator:
    """Take the rank's device and connect over NCCL; returns once every rank has.

    Nothing needs to be installed: a machine with devices may have no package index.
    """
    take_device()
    registry = Registry(())
    registry.add_backend(NcclBackend())
    registry.add_backend(GlooBackend())
    defaults = {"backend": "nccl", "connect_timeout": 20.0, "close_timeout": 10.0}
    comm = commlayer.connect({**defaults, **settings}, registry=registry)
    here.meet("connected")
    return comm


def swap(comm: Communicator, tag: int = 0) -> int:
    """One message each way on a tag; what came, 100 more than the rank that sent it."""
    peer = 1 - comm.rank
    sent = comm.isend(full(100 + comm.rank), peer, tag)
    seen = value(comm.recv(None, peer, tag))
    sent.synchronize()
    return seen
