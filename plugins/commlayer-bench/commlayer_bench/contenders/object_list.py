"""``torch.distributed``'s own object functions: everything is pickled, both sides block."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from commlayer_bench.contender import Contender, Finish, Way


def connect(name: str) -> Contender:
    way = Way(_send, _receive)
    broadcast = Way(_send_broadcast, _receive_broadcast)
    return Contender(name, {"object": way, "dict": way, "broadcast": broadcast}, early=False)


def _send(value: Any, dst: int) -> Finish:
    dist.send_object_list([value], dst)
    return lambda: None


def _receive(like: object, src: int) -> Finish:
    values: list[Any] = [None]
    dist.recv_object_list(values, src)
    return lambda: values[0]


def _send_broadcast(value: Any, src: int) -> Finish:
    dist.broadcast_object_list([value], src)
    return lambda: value


def _receive_broadcast(like: object, src: int) -> Finish:
    values: list[Any] = [None]
    dist.broadcast_object_list(values, src)
    return lambda: values[0]
