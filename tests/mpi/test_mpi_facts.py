"""What the plugin declares, seen on its endpoint without the core above it."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from mpi_job import Jobs, meet

from commlayer.backend import Endpoint

commlayer_mpi = pytest.importorskip("commlayer_mpi", reason="commlayer-mpi is not installed")

_names = itertools.count()
EAGER = commlayer_mpi.SEMANTICS.p2p.eager_bytes


def open_endpoint() -> tuple[Endpoint, int]:
    backend = commlayer_mpi.MpiBackend()
    world = backend.job(20.0)
    assert world is not None
    return backend.open(world, {}).endpoint(f"test {next(_names)}"), world.rank


def complete_eagerly() -> list[bool]:
    """Whether sends of some sizes complete before their receives are posted."""
    endpoint, rank = open_endpoint()
    sizes = [1, EAGER, 1 << 20]
    buffers = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    works, early = [], []
    if rank == 0:
        works = [endpoint.isend(buffer, 1, tag) for tag, buffer in enumerate(buffers)]
        deadline = time.monotonic() + 20
        while not all(map(endpoint.poll, works[:2])) and time.monotonic() < deadline:
            time.sleep(0.001)
        early = [endpoint.poll(work) for work in works]
    meet()
    if rank == 1:
        works = [endpoint.irecv(torch.empty_like(b), 0, tag) for tag, b in enumerate(buffers)]
    for work in works:
        endpoint.wait(work)
    meet()
    endpoint.close()
    return early


def receive_into_another_size() -> list[str]:
    endpoint, rank = open_endpoint()
    outcomes = []
    if rank == 0:
        for size, tag in ((100, 0), (1 << 20, 1), (3, 2)):
            endpoint.wait(endpoint.isend(torch.full((size,), 9, dtype=torch.uint8), 1, tag))
    else:
        for tag in (0, 1):
            work = endpoint.irecv(torch.zeros(10, dtype=torch.uint8), 0, tag)
            for ask in (endpoint.wait, endpoint.poll, endpoint.wait):
                with pytest.raises(Exception, match="truncated") as caught:
                    ask(work)
                outcomes.append(type(caught.value).__name__)
        target = torch.zeros(10, dtype=torch.uint8)
        work = endpoint.irecv(target, 0, 2)
        endpoint.wait(work)
        endpoint.wait(work)
        assert endpoint.poll(work)
        assert target.tolist() == [9] * 3 + [0] * 7
    meet()
    endpoint.close()
    return outcomes


@pytest.mark.skipif(EAGER == 0, reason="no eager size is declared for this MPI library")
def test_eager_sends_complete_alone_and_large_ones_do_not(mpi: Jobs) -> None:
    assert mpi(2).run(complete_eagerly) == [[True, True, False], []]


def test_too_long_a_message_is_an_error_to_all_who_ask(mpi: Jobs) -> None:
    assert mpi(2).run(receive_into_another_size) == [[], ["Exception"] * 6]
