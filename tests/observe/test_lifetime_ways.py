"""The lifetime checker sees writes that version counters do not, and names the posting line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from commlayer_testkit.local import connected

from commlayer import CommError, ErrorKind

SIZE = 1 << 16


def by_kernel(tensor: torch.Tensor) -> None:
    """As a kernel would that torch knows nothing of."""
    ctypes.memset(tensor.data_ptr() + 5, 7, 1)


def by_inference(tensor: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.detach().fill_(3)


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "torch": lambda tensor: tensor.fill_(2),
    "view": lambda tensor: tensor[3:4].fill_(2),
    "data": lambda tensor: tensor.data.fill_(2),
    "numpy": lambda tensor: tensor.numpy().fill(2),
    "inference": by_inference,
    "kernel": by_kernel,
}


@pytest.mark.parametrize("inference", [False, True], ids=["tensor", "inference tensor"])
@pytest.mark.parametrize("way", WAYS)
def test_an_overwrite_in_flight_is_seen(way: str, inference: bool) -> None:
    with connected(check_lifetime=True, inline_bytes=0) as (a, b):
        with torch.inference_mode(inference):
            tensor = torch.ones(SIZE, dtype=torch.uint8)
            handle = a.isend_tensor_dict({"x": tensor}, 1)
            WAYS[way](tensor)
        b.recv_tensor_dict(0)
        with pytest.raises(CommError, match="overwritten") as caught:
            handle.wait(20)
    error = caught.value
    assert error.kind is ErrorKind.LIFETIME
    assert (error.call, error.peer) == ("isend_tensor_dict", 1)
    assert f"posted at {__file__}:" in str(error)


@pytest.mark.parametrize("inference", [False, True], ids=["tensor", "inference tensor"])
def test_writing_after_the_wait_is_fine(inference: bool) -> None:
    with connected(check_lifetime=True, inline_bytes=0) as (a, b), torch.inference_mode(inference):
        tensor = torch.ones(SIZE, dtype=torch.uint8)
        handle = a.isend_tensor_dict({"x": tensor}, 1)
        b.recv_tensor_dict(0)
        handle.wait(20)
        tensor.fill_(2)
        handle.wait(20)


def test_it_is_on_in_tests_and_off_elsewhere() -> None:
    from commlayer import CommConfig

    assert not CommConfig().check_lifetime
    with connected() as comms:
        assert all(comm.config.check_lifetime for comm in comms)
