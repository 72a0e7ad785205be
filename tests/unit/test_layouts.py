"""Where tensors of a message travel."""

from __future__ import annotations

import pytest
import torch

from commlayer.wire.frame import Kind, Placement
from commlayer.wire.message import Layouts


@pytest.mark.parametrize("device_first", [False, True])
def test_tensors_of_one_shape_are_placed_by_the_memory_that_they_are_in(device_first: bool) -> None:
    """A device may be told by address alone: the simulated one is, and so is pinned memory."""
    host, device = torch.ones(4), torch.ones(4)
    layouts = Layouts(64, on_device=lambda tensor: tensor is device)
    expected = [(host, Placement.INLINE), (device, Placement.DEVICE)]
    for tensor, where in reversed(expected) if device_first else expected:
        assert list(layouts.place(Kind.TENSOR, [tensor], -1, False).placements) == [where]


def test_a_dict_on_the_device_is_never_taken_for_one_on_the_host() -> None:
    host, device = {"x": torch.ones(4)}, {"x": torch.ones(4)}
    layouts = Layouts(64, on_device=lambda tensor: tensor is device["x"])
    layout = layouts.place(Kind.TENSOR_DICT, list(host.values()), -1, False)
    layouts.remember(layouts.recall(host).key, layout, b"")
    assert layouts.recall(host).known is not None
    assert layouts.recall(device).key is None
