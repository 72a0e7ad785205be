"""The replaced calls of the pipeline group, on a stand-in for the engine's object."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commlayer_vllm.broadcasts import with_broadcast
from commlayer_vllm.wire import all_gather_in, place_in
from ranks import here
from ranks.pool import Ranks
from stand_in import Group, connected_group, end, installed

from commlayer import CommError
from commlayer.pipeline.slices import Slice, divides, gather_slices, sliced


def message(step: int) -> dict[str, Any]:
    return {"h": torch.full((3, 4), float(step)), "empty": torch.empty(0), "step": step}


def handles() -> dict[str, int]:
    group = connected_group()
    ours = installed(group)
    assert installed(group) is ours
    if group.rank_in_group == 0:
        sent = group.isend_tensor_dict(message(1))
        assert len(sent) == 2, "the metadata and the one tensor that is not empty"
        for handle in (sent[1], sent[0], sent[0], sent[1]):
            handle.wait()
            assert handle.is_completed()
        assert group.send_tensor_dict(message(2), 1) is None
        group.send_object([1], 1)
    else:
        result, received, calls = group.irecv_tensor_dict()
        assert result == {}, "nothing is known before it is waited"
        (handle,) = received
        handle.wait()
        for call in calls:
            call()
        assert list(result) == ["h", "empty", "step"]
        assert torch.equal(result["h"], message(1)["h"])
        assert handle.result() is result
        assert group.recv_tensor_dict(0)["step"] == 2
        assert group.recv_object(0) == [1]
    counts = dict(ours.counts)
    end(group)
    assert "isend_tensor_dict" not in vars(group)
    return counts


def test_handles_and_results_are_the_engines(ranks: Ranks) -> None:
    assert ranks.run(handles, 2) == [
        {"dicts sent": 2, "objects sent": 1},
        {"dicts received": 2, "objects received": 1},
    ]


def late_error() -> str:
    logging.basicConfig(level=logging.INFO)
    group = connected_group()
    installed(group, close_timeout=0.2)
    if group.rank_in_group == 0:
        group.isend_tensor_dict({"h": torch.ones(1 << 22)})
        group.destroy()
        here.meet("closed")
    else:
        here.meet("closed")
        group.destroy()
    return "closed"


def test_an_error_while_closing_is_logged_and_the_engine_goes_on(ranks: Ranks) -> None:
    first, second = ranks.spawn(late_error, 2, finalize=False)
    assert first.result() == "closed"
    assert "closed with an error" in first.output
    assert second.result() == "closed"


class Parts:
    """A tensor-parallel group in which every rank's part is that of rank 0, negated."""

    world_size = 2
    rank_in_group = 0

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        return torch.cat([part, -part])


def test_which_tensors_are_sent_in_parts() -> None:
    _, parts = place_in(Parts())
    even, odd, empty = torch.ones(2, 3), torch.ones(3), torch.ones(0)
    assert divides("x", even, parts, None)
    assert divides("x", even, parts, {"y": False})
    assert not divides("x", even, parts, {"x": False})
    assert not divides("x", odd, parts, {"x": True})
    assert not divides("x", empty, parts, {"x": True})
    assert not divides("x", even, place_in(None)[1], None)
    assert not divides("x", even, place_in(Group(size=1))[1], None)


def test_the_engines_collective_joins_parts_into_the_shape_that_was_sent() -> None:
    group = Parts()
    message = sliced({"x": torch.arange(6.0).view(2, 3), "n": 1}, None, *place_in(group))
    assert message["x"].tensor.tolist() == [0, 1, 2]
    gather_slices(message, 2, all_gather_in(group))
    assert message["x"].tolist() == [[0, 1, 2], [0, -1, -2]]
    assert message["n"] == 1


def test_a_slice_that_is_all_of_a_tensor_needs_no_group() -> None:
    message: dict[str, Any] = {"x": Slice(torch.ones(6), (2, 3), 0, 1)}
    gather_slices(message, place_in(None)[1], all_gather_in(None))
    assert message["x"].shape == (2, 3)


@pytest.mark.parametrize(
    ("part", "parts", "said"),
    [
        (Slice(torch.ones(3), (2, 3), 0, 2), 4, "in 2 parts, and all_gather_group has 4 ranks"),
        (Slice(torch.ones(3), (2, 3), 0, 2), 1, "all_gather_group has 1 rank here"),
        (Slice(torch.ones(3), (9,), 0, 2), 2, "slice 'x' contradicts itself"),
        (Slice(torch.ones(3), (2, 3), 2, 2), 2, "slice 'x' contradicts itself"),
    ],
)
def test_slices_that_do_not_add_up_are_not_gathered(part: Slice, parts: int, said: str) -> None:
    message = {"first": Slice(torch.ones(1), (parts,), 0, parts), "x": part}
    with pytest.raises(CommError, match=said):
        gather_slices(message, parts, pytest.fail)
    assert message["x"] is part


def broadcasting(tensor: Any, *, twice: bool = False) -> list[Any]:
    times = 2 if twice else 1
    return [torch.distributed.broadcast(tensor, 0, async_op=torch.is_tensor(tensor))] * times


def test_a_method_of_the_engine_broadcasts_by_commlayer_and_is_otherwise_itself() -> None:
    calls: list[Any] = []

    def broadcast(*arguments: Any, **named: Any) -> Any:
        calls.append((*arguments, named))
        return "handle"  # type: ignore[return-value]

    twin = with_broadcast(broadcasting, broadcast)  # type: ignore[arg-type]
    assert twin("tensor", twice=True) == ["handle", "handle"]
    assert calls == [("tensor", 0, {"async_op": False})]
    assert torch.distributed.broadcast is dist.broadcast
