"""The real ``ProcessGroupHCCL`` has the names, signatures and defaults that the plugin counts on.

CANN's functions are stubs: a group is really made, and can send nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commlayer_npu import NpuBackend
from torch_npu._C._distributed_c10d import ProcessGroupHCCL

LONG = timedelta(days=24)
NAME = "npu/data/0/up/2-5"


@pytest.fixture
def group() -> Iterator[Any]:
    """What the plugin makes of a lane: the pair of ranks 2 and 5, on rank 5."""
    made = NpuBackend().group(NAME, dist.HashStore(), 1, LONG)
    yield made
    made.abort()


def test_the_plugin_loads_and_says_what_is_missing() -> None:
    viability = NpuBackend().viability()
    assert not viability.ok
    assert viability.reason == "no Ascend device is visible"


def test_defaults_that_would_make_a_lane_the_global_group() -> None:
    options = ProcessGroupHCCL.Options()
    assert options.global_ranks_in_group == []
    assert options.group_id == ""
    assert options._timeout == timedelta(minutes=30)


def test_a_lane_is_a_group_of_two_with_its_ranks_and_its_name(group: Any) -> None:
    assert type(group) is ProcessGroupHCCL
    assert (group.rank(), group.size()) == (1, 2)
    assert group.options.global_ranks_in_group == [2, 5]
    assert group.options.group_id == NAME
    assert group.options._timeout == LONG


@pytest.mark.parametrize("call", ["send", "recv"])
def test_the_arguments_of_a_post_are_taken(group: Any, call: str) -> None:
    """Host memory is refused by torch_npu itself: the call as such was right."""
    post = getattr(group, call)
    with pytest.raises(TypeError):
        post(torch.zeros(4, dtype=torch.uint8), 0, 0)
    with pytest.raises(RuntimeError, match=r"NPU|npu|device"):
        post([torch.zeros(4, dtype=torch.uint8)], 0, 0)


@pytest.mark.parametrize("name", ["abort", "shutdown"])
def test_a_group_can_be_ended(group: Any, name: str) -> None:
    assert callable(getattr(group, name))
