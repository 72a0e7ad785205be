"""A stage is replaced while the survivors stay: same processes, same name, same address."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from commlayer_testkit.ports import LOOPBACK, free_port
from ranks import here
from ranks.pool import Process, Ranks

import commlayer
from commlayer import CommError, ErrorKind

SIZE = 3
SETTINGS: dict[str, Any] = {"backend": "gloo", "connect_timeout": 60.0}


def environment(rank: int, port: int, size: int = SIZE) -> dict[str, str]:
    """As of a launcher that leaves the store to rank 0."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def stage(counted: bool) -> None:
    """Connect whenever told to, and until a peer is lost; say how each attempt has ended."""
    while (generation := here.hear()) is not None:
        number = {"generation": generation} if counted else {}
        comm = commlayer.connect(SETTINGS, **number)
        following, before = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        sent = comm.isend(torch.full((1 << 18,), float(generation)), following)
        assert comm.recv(None, before)[0] == generation
        sent.wait(30)
        assert comm.broadcast_object(generation if comm.rank == 0 else None, src=0) == generation
        here.say("connected")
        neighbours = [comm.irecv(None, peer, tag=1) for peer in (before, following)]
        while not any(handle.is_completed() for handle in neighbours):
            time.sleep(0.01)
        try:
            comm.close(5)
        except CommError:
            pass
        here.say("closed")


def start(ranks: Ranks, rank: int, port: int, counted: bool) -> Process:
    return ranks.spawn(stage, 1, counted, environment=environment(rank, port), finalize=False)[0]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("counted", [False, True], ids=["by itself", "generation="])
def test_each_stage_in_turn_is_replaced(ranks: Ranks, counted: bool) -> None:
    port = free_port()
    stages = [start(ranks, rank, port, counted) for rank in range(SIZE)]
    for generation in range(SIZE + 1):
        for each in stages:
            each.say(generation)
        for each in stages:
            assert each.hear(90) == "connected"
        if generation == SIZE:
            break
        stages[generation].signal(signal.SIGKILL)
        stages[generation].wait()
        for each in stages:
            if each is not stages[generation]:
                assert each.hear(90) == "closed"
        stages[generation] = start(ranks, generation, port, counted)


def connects(generation: int) -> str:
    try:
        comm = commlayer.connect({**SETTINGS, "connect_timeout": 20.0}, generation=generation)
    except CommError as error:
        here.say("refused")
        return str(error)
    here.meet("connected", SIZE)
    comm.close()
    return ""


def test_a_stage_of_another_generation_is_told_apart(ranks: Ranks) -> None:
    port = free_port()

    def spawn(rank: int, generation: int) -> Process:
        return ranks.spawn(connects, 1, generation, environment=shared[rank], finalize=False)[0]

    shared = [environment(rank, port) for rank in range(SIZE)]
    meeting = ranks.spawn(os.getpid, 1)[0]  # its store is where those that connect meet
    meeting.result()
    store = f"{LOOPBACK}:{ranks._stores[0].port}"
    shared = [{**each, "RANKS_STORE": store} for each in shared]
    good = [spawn(0, 4), spawn(1, 4)]
    outdated = spawn(2, 3)
    assert outdated.hear(60) == "refused"
    text = outdated.result()
    assert f"rank 2 (pid {outdated.pid} on " in text
    assert "connects as generation 3, and rank 0" in text
    assert f"(pid {good[0].pid} on" in text
    assert "as generation 4" in text
    good.append(spawn(2, 4))
    assert [each.result(60) for each in good] == [""] * SIZE


@pytest.mark.parametrize("given", [-1, "1", 1.5, True])
def test_a_generation_that_is_no_number_is_refused(given: Any) -> None:
    with pytest.raises(CommError, match="generation = ") as caught:
        commlayer.connect({"backend": "gloo"}, generation=given)
    assert caught.value.kind is ErrorKind.CONFIG
