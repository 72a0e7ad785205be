"""The engine's own format, against a peer that speaks it by hand."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commlayer_vllm.pipeline_group import PipelineGroup
from commlayer_vllm.settings import settings_of
from commlayer_vllm.wire_vllm import DeviceSend, VllmWire
from ranks import here
from ranks.pool import Ranks
from stand_in import Group, TensorMetadata, connected_group

from commlayer import CommError, CommTimeout, ErrorKind

TABLE = {"wire_format": "vllm", "allow_pickle": True}

MESSAGE: dict[str, Any] = {
    "hidden": torch.arange(6.0).view(2, 3),
    "strided": torch.arange(6).view(2, 3).t(),
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "n": {"a": (1, None)},
}
METADATA = [
    ("hidden", TensorMetadata("cpu", torch.float32, torch.Size([2, 3]))),
    ("strided", TensorMetadata("cpu", torch.int64, torch.Size([3, 2]))),
    ("empty", TensorMetadata("cpu", torch.bfloat16, torch.Size([0, 3]))),
    ("n", {"a": (1, None)}),
]


def wire_of(group: Group, **table: Any) -> VllmWire:
    return VllmWire(
        group, TensorMetadata, settings_of({**TABLE, **table}, "cpu", environ={}).config
    )


def by_hand(size: int, payload: bytes, group: Any) -> None:
    dist.send(torch.tensor([size], dtype=torch.int64), 1, group=group)
    if payload:
        dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 1, group=group)


def sends() -> None:
    group = connected_group()
    if group.rank_in_group == 0:
        PipelineGroup(group, wire_of(group), Counter()).install()
        handles = group.isend_tensor_dict(MESSAGE)
        assert len(handles) == 3
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
        group.destroy()
    else:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, 0, group=group.cpu_group)
        payload = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(payload, 0, group=group.cpu_group)
        assert pickle.loads(payload.numpy().tobytes()) == METADATA
        for key in ("hidden", "strided"):
            tensor = torch.empty(MESSAGE[key].shape, dtype=MESSAGE[key].dtype)
            dist.recv(tensor, 0, group=group.cpu_group)
            assert torch.equal(tensor, MESSAGE[key])
    here.meet("end")


def test_what_is_sent(ranks: Ranks) -> None:
    ranks.run(sends, 2)


def receives() -> None:
    group = connected_group()
    if group.rank_in_group == 0:
        payload = pickle.dumps(METADATA)
        by_hand(len(payload), payload, group.cpu_group)
        for key in ("hidden", "strided"):
            dist.send(MESSAGE[key].contiguous(), 1, group=group.cpu_group)
        by_hand(len(pickle.dumps("x")), pickle.dumps("x"), group.cpu_group)
    else:
        PipelineGroup(group, wire_of(group), Counter()).install()
        result, handles, calls = group.irecv_tensor_dict()
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
        for call in calls:
            call()
        assert list(result) == list(MESSAGE)
        for key in ("hidden", "strided", "empty"):
            assert result[key].dtype == MESSAGE[key].dtype
            assert torch.equal(result[key], MESSAGE[key])
        assert result["n"] == MESSAGE["n"]
        assert group.recv_object(0) == "x"
        group.destroy()
    here.meet("end")


def test_what_is_understood(ranks: Ranks) -> None:
    ranks.run(receives, 2)


def announces_too_much() -> None:
    group = connected_group()
    if group.rank_in_group == 0:
        by_hand(1 << 20, b"", group.cpu_group)
    else:
        wire = wire_of(group, max_header_bytes=1 << 16)
        first, second = wire.irecv_object(0), wire.irecv_object(0)
        for handle in (first, second):
            with pytest.raises(CommError, match="announced 1048576 bytes") as caught:
                handle.wait(20)
            assert caught.value.kind is ErrorKind.PROTOCOL
            assert handle.exception() is not None
    here.meet("end")


def test_metadata_of_an_absurd_size_ends_the_line(ranks: Ranks) -> None:
    ranks.run(announces_too_much, 2)


def limit_before_receive() -> None:
    group = connected_group()
    wire = wire_of(group)
    if group.rank_in_group == 0:
        (handle, *_) = wire.isend_tensor_dict({}, 1, None, None)
        for _ in range(2):
            with pytest.raises(CommTimeout, match="send metadata to rank 1: not complete"):
                handle.wait(0.05)
        assert not handle.is_completed()
        here.meet("timed out")
        handle.wait(20)
    else:
        here.meet("timed out")
        _, (receive,), _ = wire.irecv_tensor_dict(0, None, None)
        assert receive.result(20) == {}
    here.meet("end")


def test_an_expired_limit_changes_nothing(ranks: Ranks) -> None:
    ranks.run(limit_before_receive, 2)


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_none_is_refused_on_a_device_too(limit: float) -> None:
    handle = DeviceSend(None, torch.ones(1))
    handle.wait(1.0)
    with pytest.raises(ValueError, match="timeout"):
        handle.wait(limit)
