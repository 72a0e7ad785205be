"""Tags on objects and dicts, and integers that are not Python's own."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from commlayer_testkit.local import Hub, connect_rank, connected, on_every_rank

from commlayer.errors import CommError, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast
from commlayer.wire.tags import BROADCAST, CONTROL_LANE, MAX_TAG, OBJECTS, SLICES, TagMap, objects


def test_every_lane_has_a_native_tag_of_its_own() -> None:
    tags = TagMap([f"c{n}" for n in range(1000)])
    numbers = ("0", "1", "7", "65534", "65535")
    names = [
        *numbers,
        OBJECTS,
        *(objects(number) for number in numbers[1:]),
        BROADCAST,
        CONTROL_LANE[1],
        SLICES,
    ]
    seen = set()
    for channel in ("data", "broadcast", "c0", "c999"):
        for name in names:
            assert tags.valid(channel, name)
            for slot in range(8):
                seen.add(TagMap.payload(tags.native(channel, name), slot))
    assert len(seen) == 4 * len(names) * 8
    assert all(0 <= number < 1 << 30 for number in seen)
    for name in ("objects:0", "objects:", "objects:65536", "objects:01", "objects:-1", "x:1", "00"):
        assert not tags.valid("data", name)


def test_objects_of_one_tag_do_not_wait_for_another() -> None:
    with connected() as (a, b):
        late = b.irecv_object(0, tag=MAX_TAG)
        for tag in (0, 1, 65535):
            a.isend_object(("object", tag), 1, tag=tag)
            a.isend_tensor_dict({"x": torch.full((3,), tag)}, 1, tag=tag)
            a.isend(torch.full((2,), tag), 1, tag=tag)
        assert b.recv_object(0, tag=1) == ("object", 1)
        assert b.recv_object(0) == ("object", 0)
        assert late.result(30) == ("object", 65535)
        for tag in (65535, 0, 1):
            assert b.irecv_tensor_dict(0, tag=tag).result(30)["x"].tolist() == [tag] * 3
            assert b.recv(None, 0, tag=tag).tolist() == [tag] * 2
        receive = b.irecv_object(0, tag=5)
        a.send_object("blocking", 1, tag=5)
        assert receive.result(30) == "blocking"
        receive = b.irecv_tensor_dict(0, tag=5)
        a.send_tensor_dict({"k": 1}, 1, tag=5)
        assert receive.result(30) == {"k": 1}
        a.isend_tensor_dict({"k": 2}, 1, tag=5)
        assert b.recv_tensor_dict(0, tag=5) == {"k": 2}


@pytest.mark.parametrize("tag", [-1, 65536, True, 1.0, "0", None])
def test_what_is_no_tag_of_an_object(tag: Any) -> None:
    with connected() as (a, _):
        for call in (
            lambda: a.isend_object(1, 1, tag=tag),
            lambda: a.irecv_object(1, tag=tag),
            lambda: a.isend_tensor_dict({}, 1, tag=tag),
            lambda: a.irecv_tensor_dict(1, tag=tag),
        ):
            with pytest.raises(CommError, match="not an integer from 0 to 65535") as caught:
                call()
            assert caught.value.kind is ErrorKind.CONFIG


def test_an_error_names_the_tag() -> None:
    with connected() as (a, b):
        receive = b.irecv_object(0, tag=7)
        a.isend_tensor_dict({}, 1, tag=7)
        with pytest.raises(CommError, match="sent a tensor dict") as caught:
            receive.wait(30)
        assert caught.value.tag == "objects:7"


NUMBERS = [np.int64, np.int32, np.uint8, torch.tensor]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: n.__name__)
def test_other_integers_are_ranks_and_tags(number: Any) -> None:
    with connected() as (a, b):
        a.isend(torch.ones(2), number(1), tag=number(3))
        assert b.irecv(None, number(0), number(3)).result(30).sum() == 2
        a.isend_object("x", number(1), tag=number(4))
        assert b.recv_object(number(0), tag=number(4)) == "x"
        a.isend_tensor_dict({"x": 1}, number(1))
        assert b.recv_tensor_dict(number(0)) == {"x": 1}
        a.broadcast(torch.ones(2), number(0), async_op=True, at_most=number(8))
        assert b.broadcast(None, number(0), at_most=number(8)).sum() == 2
        a.broadcast_object("y", number(0), async_op=True)
        assert b.broadcast_object(None, number(0)) == "y"


@pytest.mark.parametrize("rank", [np.int64(2), np.int64(-1), np.bool_(True), np.float64(1.0)])
def test_what_is_no_rank(rank: Any) -> None:
    with connected() as (a, _), pytest.raises(CommError, match="is not a rank"):
        a.isend(torch.ones(1), rank)


@pytest.mark.parametrize("limit", [np.int64(30), np.float32(30), np.float64(30), np.uint8(30)])
def test_other_numbers_are_limits(limit: Any) -> None:
    with connected() as (a, b):
        handle = a.isend(torch.ones(2), 1)
        b.irecv(None, 0).wait(limit)
        handle.wait(limit)
        a.drain(limit)
        with pytest.raises(ValueError, match="negative"):
            handle.wait(np.float32("nan"))
        with pytest.raises(ValueError, match="a number of seconds"):
            handle.wait(np.bool_(True))  # type: ignore[arg-type]


def test_other_integers_are_steps() -> None:
    with connected() as (a, b):
        sides = [DeferredBroadcast(comm, np.int64(0)) for comm in (a, b)]
        sides[0].post(np.int64(3), torch.ones(2), agreed=[np.int64(1)])
        sides[1].post(np.int64(3), agreed=[1])
        assert sides[1].take(30).sum() == 2


def test_gathers_of_several_tags() -> None:
    hub, tp = Hub(4), [Hub(2), Hub(2)]

    def body(rank: int) -> Any:

        with connect_rank(hub, rank) as world, connect_rank(tp[rank // 2], rank % 2) as group:
            if rank < 2:
                for tag in (1, 2):
                    world.isend_tensor_dict(
                        {"h": torch.arange(8) * tag}, rank + 2, all_gather_group=group, tag=tag
                    )
                return world.recv_object(rank + 2)
            handles = [
                world.irecv_tensor_dict(rank - 2, all_gather_group=group, tag=tag) for tag in (1, 2)
            ]
            got = [handles[n].result(30)["h"].tolist() for n in (1, 0)]
            world.isend_object("done", rank - 2).wait(30)
            return got

    results = on_every_rank(hub, body)
    expected = [(torch.arange(8) * tag).tolist() for tag in (2, 1)]
    assert results == ["done", "done", expected, expected]


UNEQUAL = {
    "width": (torch.zeros(8), torch.zeros(4), r"float32 of shape \[8\].*float32 of shape \[4\]"),
    "dtype": (torch.zeros(8), torch.zeros(8).int(), "float32 of shape.*int32 of shape"),
}


@pytest.mark.parametrize(("first", "second", "said"), UNEQUAL.values(), ids=UNEQUAL)
def test_unequal_tensors_of_one_group_are_named(first: Any, second: Any, said: str) -> None:
    hub, tp = Hub(4), [Hub(2), Hub(2)]

    def body(rank: int) -> Any:
        with connect_rank(hub, rank) as world, connect_rank(tp[rank // 2], rank % 2) as group:
            if rank < 2:
                value = {"h": (first, second)[rank], "g": torch.zeros(2)}
                world.isend_tensor_dict(value, rank + 2, all_gather_group=group)
                return world.recv_object(rank + 2)
            with pytest.raises(CommError) as caught:
                world.irecv_tensor_dict(rank - 2, all_gather_group=group).result(30)
            world.isend_object("done", rank - 2).wait(30)
            return caught.value

    _, _, one, other = on_every_rank(hub, body)
    assert one.kind is other.kind is ErrorKind.PROTOCOL
    assert "'h'" in one.cause
    assert "all_gather_tensors={'h': False}" in one.cure

    assert re.search(said, one.cause), one.cause
