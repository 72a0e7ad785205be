"""Simulated ranks have no kernel that could watch them: liveness is off there."""

from __future__ import annotations

import socket

import pytest
from commlayer_testkit.sim import Rank, World, profile
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.mount_core import connect


def test_simulated_ranks_open_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    got = []

    def body(rank: Rank) -> None:
        comm = connect(rank)
        if rank.index == 0:
            comm.isend_object("hello", 1)
        else:
            got.append(comm.recv_object(0))
        comm.close()

    monkeypatch.setattr(socket.socket, "__init__", refuse)
    world = World(ReplayChoices(), profile("gloo"))
    try:
        world.start(2, body)
        world.run()
    finally:
        world.close()
    assert world.failure is None
    assert got == ["hello"]
