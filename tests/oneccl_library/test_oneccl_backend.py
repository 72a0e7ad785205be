"""commlayer over oneCCL's own library: its payloads travel there, and nowhere else.

Every rule of the conformance kit up to L2 is run by ``certify.py``.
"""

from __future__ import annotations

import pytest
import torch
from ranks.pool import Ranks
from torch import Tensor

import commlayer
from commlayer.registry import Registry, default_registry
from oneccl_library.backend import OneCclCpuBackend
from oneccl_library.library import Group, Work

NBYTES = 1 << 20
LIMIT = 60.0


def connect() -> commlayer.Communicator:
    registry = Registry(())
    registry.add_backend(OneCclCpuBackend())
    registry.add_backend(default_registry().load("gloo").backend)
    return commlayer.connect({"backend": "oneccl_cpu"}, registry=registry)


def exchange() -> list[int]:
    """Both ranks send first, on the default lane and on a tag; the sizes that oneCCL was given."""
    given: list[int] = []
    post = Group.send

    def recorded(group: Group, tensors: list[Tensor], dst: int, tag: int) -> Work:
        given.extend(tensor.nbytes for tensor in tensors)
        return post(group, tensors, dst, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Group, "send", recorded)
        comm = connect()
        peer = 1 - comm.rank
        sends = [
            comm.isend_tensor_dict({"x": torch.full((NBYTES,), comm.rank).byte(), "n": 5}, peer)
        ]
        sends += [comm.isend(torch.full((NBYTES,), i).byte(), peer, tag=1) for i in range(5)]
        found = comm.irecv_tensor_dict(peer).result(LIMIT)
        assert found["n"] == 5
        assert found["x"].eq(peer).all()
        for i in range(5):
            assert comm.irecv(None, peer, tag=1).result(LIMIT).eq(i).all()
        for send in sends:
            send.synchronize(LIMIT)
        comm.close(LIMIT)
    # A byte that connects a lane comes first on each.
    return [nbytes for nbytes in given if nbytes > 1]


def test_every_payload_travels_over_oneccl(ranks: Ranks) -> None:
    assert ranks.run(exchange, 2, timeout=2 * LIMIT) == [[NBYTES] * 6] * 2
