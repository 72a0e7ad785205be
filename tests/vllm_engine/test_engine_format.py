"""The engine's own format: a rank with the plugin beside one without, as in a rolling change."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommError, ErrorKind

VLLM = {"wire_format": "vllm", "allow_pickle": True}
LARGE = 1 << 20

MESSAGES: list[dict[str, Any]] = [
    {"hidden_states": torch.arange(24.0).view(4, 6), "residual": -torch.arange(24.0).view(4, 6)},
    {"x": torch.ones(3, dtype=torch.bfloat16), "empty": torch.empty(0, 4), "n": 5, "s": {"a": [1]}},
    {},
    {"only": "metadata"},
    {"large": torch.arange(float(LARGE)), "strided": torch.arange(12).view(3, 4).t()},
]


def same(received: Any, sent: dict[str, Any]) -> None:
    assert list(received) == list(sent)
    for key, value in sent.items():
        if isinstance(value, torch.Tensor):
            assert received[key].dtype == value.dtype
            assert received[key].shape == value.shape
            assert torch.equal(received[key], value)
        else:
            assert received[key] == value


def both_directions(with_plugin: tuple[int, ...]) -> None:
    """Each rank sends to the other, by the asynchronous and the synchronous calls."""
    group = groups.pipeline()
    if here.rank() in with_plugin:
        groups.installed(group, **VLLM)
    # The stock sender raises for a tensor that is not contiguous.
    messages = [{k: _contiguous(v) for k, v in message.items()} for message in MESSAGES]
    for source in (0, 1):
        for message in messages:
            if group.rank_in_group == source:
                for handle in group.isend_tensor_dict(message):
                    handle.wait()
            else:
                result, handles, calls = group.irecv_tensor_dict()
                for handle in handles:
                    handle.wait()
                for call in calls:
                    call()
                same(result, message)
        if group.rank_in_group == source:
            group.send_tensor_dict(messages[0])
            group.send_object({"a": object}, 1 - source)
            group.isend_object("b", 1 - source).wait()
        else:
            same(group.recv_tensor_dict(), messages[0])
            assert group.recv_object(source) == {"a": object}
            assert group.recv_object(source) == "b"
    here.meet("end")
    groups.end(group)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("with_plugin", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_a_rank_with_the_plugin_and_one_without_understand_each_other(
    ranks: Ranks, with_plugin: tuple[int, ...]
) -> None:
    ranks.run(both_directions, 2, with_plugin)


def parts(with_plugin: tuple[int, ...]) -> None:
    """Two stages of two tensor-parallel ranks: 0, 1 send to 2, 3."""
    from test_coordinator import Gathering

    tensor_parallel = groups.make([[0, 1], [2, 3]], "tp")
    tensor_parallel.device_communicator = Gathering(tensor_parallel)
    group = groups.make([[0, 2], [1, 3]])
    if here.rank() in with_plugin:
        groups.installed(group, **VLLM)
    whole = {"a": torch.arange(24.0).view(4, 6), "odd": torch.arange(3.0), "own": torch.ones(4)}
    decision = {"own": False}
    if group.rank_in_group == 0:
        group.send_tensor_dict(whole, None, tensor_parallel, decision)
    else:
        same(group.recv_tensor_dict(None, tensor_parallel, decision), whole)
    here.meet("end")
    groups.end(group)


@pytest.mark.parametrize("with_plugin", [(0, 1), (2, 3)], ids=["senders", "receivers"])
def test_parts_too(ranks: Ranks, with_plugin: tuple[int, ...]) -> None:
    ranks.run(parts, 4, with_plugin, timeout=60)


def order_of_sends() -> None:
    group = groups.pipeline()
    groups.installed(group, **VLLM)
    posted: list[torch.Tensor] = []
    isend = dist.isend

    def recording(tensor: torch.Tensor, **named: Any) -> Any:
        posted.append(tensor)
        return isend(tensor, **named)

    if group.rank_in_group == 0:
        dist.isend = recording
        tensor = torch.ones(5)
        group.isend_tensor_dict({"t": tensor, "empty": torch.empty(0)})[0].wait()
        size, payload, sent = posted
        assert size.dtype == torch.int64
        assert size.tolist() == [payload.numel()]
        assert sent.data_ptr() == tensor.data_ptr()
    else:
        group.recv_tensor_dict()
    groups.end(group)


def test_the_size_is_sent_before_the_metadata_and_that_before_the_tensors(ranks: Ranks) -> None:
    ranks.run(order_of_sends, 2)


def no_work() -> None:
    group = groups.pipeline()
    groups.installed(group, **VLLM)
    if group.rank_in_group == 0:
        dist.isend = lambda *_, **__: None  # type: ignore[assignment]
        handles = group.isend_tensor_dict({"t": torch.ones(2)})
        for handle in handles:
            handle.wait()
            assert handle.is_completed()
    groups.end(group)


def test_a_work_that_is_none_is_skipped(ranks: Ranks) -> None:
    ranks.run(no_work, 2)


def queue_of_sends() -> None:
    group = groups.pipeline()
    groups.installed(group, **VLLM)
    here.say("connected")
    here.hear()
    if group.rank_in_group == 0:
        memory, handles = [], []
        for step in range(2):
            tensor = torch.ones(LARGE)
            memory.append(weakref.finalize(tensor.untyped_storage(), str))
            handles.append(group.isend_tensor_dict({"t": tensor, "step": step}))
            del tensor
        handles.append(group.isend_tensor_dict({"step": 2}))
        gc.collect()
        assert not any(handle.is_completed() for message in handles for handle in message)
        assert all(storage.alive for storage in memory)
        here.say("posted")
        handles[2][0].wait(30)
        gc.collect()
        assert all(handle.is_completed() for message in handles for handle in message)
        assert not any(storage.alive for storage in memory)
    else:
        for step in range(2):
            assert group.recv_tensor_dict()["step"] == step
        assert group.recv_tensor_dict() == {"step": 2}
    groups.end(group)


def test_a_queue_of_sends_completes_in_order_without_being_waited(ranks: Ranks) -> None:
    sender, receiver = ranks.spawn(queue_of_sends, 2, finalize=False)
    for process in (sender, receiver):
        process.hear()
    sender.say("go")
    sender.hear()
    receiver.say("go")
    collect([sender, receiver])


def dropped() -> None:
    group = groups.pipeline()
    if group.rank_in_group == 0:
        groups.installed(group, **VLLM)
        for step in range(20):
            group.isend_tensor_dict({"t": torch.full((100,), float(step)), "step": step})
            gc.collect()
        group.isend_tensor_dict({"last": True})
    else:
        for step in range(20):
            assert group.recv_tensor_dict()["t"].unique().tolist() == [float(step)]
        assert group.recv_tensor_dict() == {"last": True}
    groups.end(group)


def test_dropped_handles_are_delivered_to_a_stock_rank(ranks: Ranks) -> None:
    ranks.run(dropped, 2)


def send_forever(group: Any, tensor: torch.Tensor) -> None:
    while True:
        for handle in group.isend_tensor_dict({"t": tensor}):
            handle.wait()


def dying_peer() -> None:
    group = groups.pipeline()
    groups.installed(group, **VLLM)
    here.say("connected")
    here.hear()
    if group.rank_in_group == 0:
        with pytest.raises(CommError, match="rank 1") as caught:
            send_forever(group, torch.ones(4))
        assert caught.value.kind is ErrorKind.PEER_LOST
    else:
        for _ in range(20):
            group.recv_tensor_dict()
        here.say("received")
        while True:
            group.recv_tensor_dict()


def test_a_peer_that_dies_is_named(ranks: Ranks) -> None:
    groups.killed(ranks, dying_peer)


def never_received() -> None:
    group = groups.pipeline()
    ours = groups.installed(group, close_timeout=0.5, **VLLM)
    if group.rank_in_group == 0:
        group.isend_tensor_dict({"t": torch.ones(4)})
        with pytest.raises(CommError, match="sends to rank 1 were not received within"):
            ours.wire.close()
    here.meet("end")


def test_closing_names_the_rank_that_does_not_receive(ranks: Ranks) -> None:
    for process in ranks.spawn(never_received, 2, finalize=False):
        process.result(30)
