"""The common way of engines: pickled metadata of length and payload, then a message a tensor.

The receiver blocks for the metadata, because it cannot post anything before.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlayer_bench.contender import Contender, Finish, Way

TAG = 99


def connect(name: str) -> Contender:
    return Contender(
        name,
        {
            "object": Way(_send_object, _receive_object),
            "dict": Way(_send_dict, _receive_dict),
            "broadcast": Way(_send_broadcast, _receive_broadcast),
        },
        early=False,
    )


def _send_object(value: Any, dst: int) -> Finish:
    return _finish(_post_object(value, dst))


def _receive_object(like: Any, src: int) -> Finish:
    value = _take_object(src)
    return lambda: value


def _send_dict(value: dict[str, Tensor], dst: int) -> Finish:
    metadata = [(key, tensor.dtype, tensor.shape) for key, tensor in value.items()]
    works = _post_object(metadata, dst)
    works += [dist.isend(tensor, dst, tag=TAG) for tensor in value.values()]
    return _finish(works)


def _receive_dict(like: object, src: int) -> Finish:
    value = {key: torch.empty(shape, dtype=dtype) for key, dtype, shape in _take_object(src)}
    works = [dist.irecv(tensor, src, tag=TAG) for tensor in value.values()]

    def finish() -> dict[str, Tensor]:
        _finish(works)()
        return value

    return finish


def _send_broadcast(tensor: Tensor, src: int) -> Finish:
    dist.broadcast_object_list([(tensor.dtype, tensor.shape)], src)
    work: Any = dist.broadcast(tensor, src, async_op=True)
    return _finish([work])


def _receive_broadcast(like: object, src: int) -> Finish:
    metadata: list[Any] = [None]
    dist.broadcast_object_list(metadata, src)
    dtype, shape = metadata[0]
    tensor = torch.empty(shape, dtype=dtype)
    work: Any = dist.broadcast(tensor, src, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return tensor

    return finish


def _post_object(value: Any, dst: int) -> list[Any]:
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([payload.numel()], dtype=torch.int64)
    return [dist.isend(length, dst, tag=TAG), dist.isend(payload, dst, tag=TAG)]


def _take_object(src: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, src, tag=TAG)
    payload = torch.empty(int(length), dtype=torch.uint8)
    dist.recv(payload, src, tag=TAG)
    return pickle.loads(payload.numpy().data)


def _finish(works: list[Any]) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish
