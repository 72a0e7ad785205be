"""The turns of the ``ccl`` path over oneCCL's own library, under a lock like that of the bindings.

The bindings themselves cannot be had here.  What they add is played: a lock of the process from a
post until its operation is complete, and a communicator that its first operation makes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from commlayer_oneccl.turns import TurnGroup
from ranks import here
from ranks.pool import Ranks
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from oneccl_library.library import Group, Work

NBYTES = 1 << 20
TIMES = 5
PATIENCE = 90.0

_lock = threading.Lock()


class LockedWork:
    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()
        _lock.release()


class LockedGroup:
    def __init__(self, store: Any, rank: int) -> None:
        self._group = Group(store, rank)
        self._connected = False

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> LockedWork:
        return self._post(self._group.send, tensors, dst)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> LockedWork:
        return self._post(self._group.recv, tensors, src)

    def _post(self, post: Callable[..., Work], tensors: list[Tensor], peer: int) -> LockedWork:
        _lock.acquire()
        if not self._connected:
            self._group.connect()
            self._connected = True
        return LockedWork(post(tensors, peer, 0))


def lane(name: str, sends: bool, wrong: list[str]) -> threading.Thread:
    store, rank = PrefixStore(name, here.store().clone()), here.rank()
    group = TurnGroup(LockedGroup(store, rank), PrefixStore("turns", store), rank)

    def body() -> None:
        for value in range(TIMES):
            tensor = torch.full((NBYTES,), value if sends else 99, dtype=torch.uint8)
            post = group.send if sends else group.recv
            post([tensor], 1 - rank, 0).wait()
            if not tensor.eq(value).all():
                wrong.append(f"{name}: message {value}")

    return threading.Thread(target=body, daemon=True)


def exchange() -> list[str]:
    """Four lanes; either rank starts with those on which it sends."""
    names = ["up", "down", "up with a tag", "down with a tag"]
    wrong: list[str] = []
    lanes = {name: lane(name, name.startswith("up") == (here.rank() == 0), wrong) for name in names}
    order = names if here.rank() == 0 else [*names[1::2], *names[::2]]
    for name in order:
        lanes[name].start()
    for name, thread in lanes.items():
        thread.join(PATIENCE)
        if thread.is_alive():
            wrong.append(f"{name} waits for ever")
    return wrong


def test_opposite_sends_under_one_lock_of_the_process_take_turns(ranks: Ranks) -> None:
    assert ranks.run(exchange, 2, timeout=100) == [[], []]
