"""Connecting in forked children, while the parent connects, and after it."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
from commlayer_testkit.ports import LOOPBACK, free_port
from ranks import here
from ranks.pool import Ranks

import commlayer
from commlayer import CommError

SETTINGS: dict[str, Any] = {"backend": "gloo", "connect_timeout": 60.0}
CHILDREN = 3


def connects(name: str) -> str:
    """Connect, exchange and close; what went wrong, if anything."""
    try:
        with commlayer.connect({**SETTINGS, "name": name}) as comm:
            said = comm.broadcast_object(name if comm.rank == 0 else None, src=0)
    except CommError as error:
        return str(error)
    return "" if said == name else f"{said} instead of {name}"


def in_child(name: str) -> tuple[int, int]:
    """The pid of a forked child that connects, and the descriptor at which it says how it went."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "wb") as file:
            pickle.dump(connects(name), file)
        os._exit(0)
    os.close(writer)
    return child, reader


def heard(child: int, reader: int) -> str:
    with os.fdopen(reader, "rb") as file:
        said: str = pickle.load(file)
    os.waitpid(child, 0)
    return said


def parent_and_children() -> list[str]:
    """All at once, on a store that the parent has used before."""
    comm = commlayer.connect(SETTINGS)
    children = [in_child(f"child {number}") for number in range(CHILDREN)]
    said = [connects(f"parent {number}") for number in range(CHILDREN)]
    said += [heard(*child) for child in children]
    assert comm.broadcast_object(said if comm.rank == 0 else None, src=0) is not None
    comm.close()
    return [text for text in said if text]


@pytest.mark.parametrize("served", ["by rank 0", "by the launcher"])
def test_parent_and_children_connect_at_once(ranks: Ranks, served: str) -> None:
    environment = {}
    if served == "by rank 0":
        environment = {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
    results = ranks.run(parent_and_children, 2, timeout=100, environment=environment)
    assert results == [[], []]


def child_of_a_group_member() -> list[str]:
    """The default store of torch.distributed, of which the child has a client of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    children = [in_child(f"child {number}") for number in range(CHILDREN)]
    said = [connects(f"parent {number}") for number in range(CHILDREN)]
    said += [heard(*child) for child in children]
    dist.barrier()
    dist.destroy_process_group()
    return [text for text in said if text]


def test_children_of_members_of_a_torch_group_connect(ranks: Ranks) -> None:
    assert ranks.run(child_of_a_group_member, 2, timeout=100) == [[], []]


def child_outlives_the_call() -> None:
    """A child that is forked while another thread connects can connect, too."""
    import threading

    def connect() -> None:
        commlayer.connect({**SETTINGS, "name": "late"}).close()

    connecting = threading.Thread(target=connect)
    if here.rank() == 0:
        connecting.start()
    else:
        here.hear()
    child = in_child("child")
    if here.rank() == 0:
        here.say("forked")
    assert heard(*child) == ""
    if here.rank() == 1:
        connecting.start()
    connecting.join(60)
    assert not connecting.is_alive()


def test_a_child_that_is_forked_while_a_thread_connects_can_connect(ranks: Ranks) -> None:
    from ranks.pool import collect

    first, second = processes = ranks.spawn(child_outlives_the_call, 2)
    assert first.hear() == "forked"
    second.say("go on")
    collect(processes, 100)
