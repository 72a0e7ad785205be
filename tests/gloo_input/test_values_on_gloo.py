"""What arrives over gloo is what was sent, bit by bit."""

from __future__ import annotations

import pytest
import torch
from bits import filled, same
from ranks import here
from ranks.pool import Ranks
from torch import Tensor

from commlayer import CommError, ErrorKind
from commlayer.wire.tensors import DTYPES


def every_dtype() -> None:
    comm = here.connect()
    for dtype in DTYPES.values():
        for size in (0, 5, 20_000):
            value = filled(dtype, size)
            if comm.rank == 0:
                comm.isend(value, 1)
                comm.isend_tensor_dict({"x": value, "y": value[:1]}, 1)
                comm.broadcast(value, 0, async_op=True)
                comm.broadcast_tensor_dict({"x": value}, 0, async_op=True)
            else:
                into = torch.empty_like(value)
                comm.recv(into, 0)
                received = comm.recv_tensor_dict(0)
                assert same(into, value)
                assert same(received["x"], value)
                assert same(received["y"], value[:1])
                assert same(comm.broadcast(torch.empty_like(value), 0), value)
                assert same(comm.broadcast_tensor_dict(None, 0)["x"], value)
    comm.close()


def test_every_dtype_by_point_to_point_and_broadcast(ranks: Ranks) -> None:
    ranks.run(every_dtype, 2)


def views(size: int) -> list[Tensor]:
    base = torch.arange(float(size * size)).reshape(size, size)
    return [
        base.t(),
        base[:, 1],
        base[::2, 1::2],
        base[0].expand(3, size),
        base[2:],
        base[1, 1],
        base.clone().requires_grad_(),
        torch.complex(base, base).conj(),
        torch.complex(base, base).conj().imag,
        base[:0],
    ]


def every_view() -> None:
    comm = here.connect()
    for size in (4, 150):
        for view in views(size):
            if comm.rank == 0:
                comm.isend(view, 1)
                comm.isend_tensor_dict({"view": view}, 1)
                comm.broadcast(view, 0, async_op=True)
            else:
                expected = view.detach().resolve_conj().resolve_neg().contiguous()
                assert same(comm.recv(None, 0), expected)
                assert same(comm.recv_tensor_dict(0)["view"], expected)
                target = torch.empty(*expected.shape, 2, dtype=expected.dtype)[..., 0]
                comm.broadcast(target, 0)
                assert same(target.contiguous(), expected)
    comm.close()


def test_every_view(ranks: Ranks) -> None:
    ranks.run(every_view, 2)


def mixed_dict() -> None:
    comm = here.connect()
    value = {
        "z": torch.arange(5),
        "empty": torch.empty(0, 7),
        "none": None,
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "large": torch.arange(90_000),
        "nested": {"y": [torch.ones(2), (1, 2.5, True)], 3: {"deep": torch.zeros(0)}},
        "a": "text",
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "dtype": torch.float16,
        "size": torch.Size([1, 0]),
    }
    if comm.rank == 0:
        for _ in range(3):
            comm.isend_tensor_dict(value, 1)
    else:
        for _ in range(3):
            received = comm.recv_tensor_dict(0)
            assert list(received) == list(value)
            for key in ("z", "empty", "scalar", "large"):
                assert same(received[key], value[key])
            assert same(received["nested"]["y"][0], value["nested"]["y"][0])
            assert received["nested"]["y"][1] == (1, 2.5, True)
            assert received["nested"][3]["deep"].shape == (0,)
            for key in ("none", "a", "bytes", "complex", "dtype", "size"):
                assert received[key] == value[key]
    comm.close()


def test_a_mixed_dict_keeps_everything_and_its_order(ranks: Ranks) -> None:
    ranks.run(mixed_dict, 2)


def misfits() -> None:
    comm = here.connect()
    for size in (3, 50_000):
        targets = [
            torch.zeros(size - 1),
            torch.zeros(size, dtype=torch.int32),
            torch.zeros(4 * size, dtype=torch.uint8),
            torch.zeros(0),
        ]
        if comm.rank == 0:
            handles = [comm.isend(torch.full((size,), float(i)), 1) for i in (8, 9)]
            for handle in handles:
                handle.wait(20)
        else:
            for target in targets:
                with pytest.raises(CommError, match=r"the peer sent float32 of shape") as caught:
                    comm.recv(target, 0)
                assert caught.value.kind is ErrorKind.PROTOCOL
                assert not target.any()
            larger = torch.zeros(size + 1)
            assert comm.recv(larger, 0).sum() == 8 * size == larger.sum()
            assert comm.recv(torch.empty(size), 0).sum() == 9 * size
        for bad in (torch.eye(3).to_sparse(), torch.ones(2, device="meta"), object()):
            with pytest.raises(CommError) as caught:
                comm.isend_tensor_dict({"good": torch.ones(size), "bad": bad}, 1 - comm.rank)
            assert caught.value.kind is ErrorKind.UNSUPPORTED
    if comm.rank == 0:
        comm.isend_tensor_dict({"only": "this"}, 1)
    else:
        assert comm.recv_tensor_dict(0) == {"only": "this"}
    comm.close()


def test_what_does_not_fit_fails_its_own_receive_and_aborts_nothing(ranks: Ranks) -> None:
    ranks.run(misfits, 2)
