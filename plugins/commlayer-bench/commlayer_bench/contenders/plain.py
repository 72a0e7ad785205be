"""``torch.distributed`` by hand, every shape known in advance: the floor."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlayer_bench.contender import Contender, Finish, Way

TAG = 100


def connect(name: str) -> Contender:
    return Contender(
        name,
        {
            "tensor": Way(_send_tensor, _receive_tensor),
            "object": Way(_send_object, _receive_object),
            "dict": Way(_send_dict, _receive_dict),
            "broadcast": Way(_broadcast, lambda like, src: _broadcast(torch.empty_like(like), src)),
        },
    )


def _send_tensor(tensor: Tensor, dst: int) -> Finish:
    return _all([_isend(tensor, dst, TAG)])


def _receive_tensor(like: Tensor, src: int) -> Finish:
    tensor = torch.empty_like(like)
    return _then(_all([_irecv(tensor, src, TAG)]), lambda: tensor)


def _send_object(value: Any, dst: int) -> Finish:
    return _send_tensor(_pickled(value), dst)


def _receive_object(like: Any, src: int) -> Finish:
    finish = _receive_tensor(_pickled(like), src)
    return lambda: pickle.loads(finish().numpy().data)


def _send_dict(value: dict[str, Tensor], dst: int) -> Finish:
    return _all([_isend(tensor, dst, TAG + i) for i, tensor in enumerate(value.values())])


def _receive_dict(like: dict[str, Tensor], src: int) -> Finish:
    value = {key: torch.empty_like(tensor) for key, tensor in like.items()}
    works = [_irecv(tensor, src, TAG + i) for i, tensor in enumerate(value.values())]
    return _then(_all(works), lambda: value)


def _broadcast(tensor: Tensor, src: int) -> Finish:
    work: Any = dist.broadcast(tensor, src, async_op=True)
    return _then(work.wait, lambda: tensor)


def _isend(tensor: Tensor, dst: int, tag: int) -> Any:
    return dist.isend(tensor, dst, tag=tag)


def _irecv(tensor: Tensor, src: int, tag: int) -> Any:
    return dist.irecv(tensor, src, tag=tag)


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _all(works: Sequence[Any]) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish


def _then(wait: Callable[[], object], value: Callable[[], Any]) -> Finish:
    def finish() -> Any:
        wait()
        return value()

    return finish
