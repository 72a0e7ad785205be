"""The engine's own pipeline group in processes of their own, with commlayer in it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import groups
import pytest
import torch
import torch.distributed as dist
from ranks import here
from ranks.pool import Ranks, collect
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.worker.gpu_worker import AsyncIntermediateTensors

from commlayer import CommError, ErrorKind

HUGE = 1 << 23


def hidden(step: int, rows: int = 4, width: int = 8) -> dict[str, Any]:
    return {
        "hidden_states": torch.full((rows, width), float(step)),
        "residual": torch.full((rows, width), -float(step)),
        "empty": torch.empty(0, 3),
        "step": step,
    }


def same(received: Any, sent: dict[str, Any]) -> None:
    assert list(received) == list(sent)
    for key, value in sent.items():
        if isinstance(value, torch.Tensor):
            assert received[key].dtype == value.dtype
            assert torch.equal(received[key], value)
        else:
            assert received[key] == value


# The engine's habits


def handles_and_results() -> None:
    group = groups.pipeline()
    ours = groups.installed(group)
    for step in range(3):
        if group.rank_in_group == 0:
            handles = group.isend_tensor_dict(hidden(step))
            assert len(handles) == 3, "metadata, and each tensor that is not empty"
            for handle in (*handles[1:], handles[0], *handles):
                handle.wait()
                assert handle.is_completed()
        else:
            result, handles, calls = group.irecv_tensor_dict()
            for handle in (*handles, *handles):
                handle.wait()
                assert handle.is_completed()
            for call in calls:
                call()
            same(result, hidden(step))
    if group.rank_in_group == 0:
        assert group.send_tensor_dict(hidden(9), dst=1) is None
        group.isend_object({"a": [1, 2.5, None]}, dst=1)
        group.send_object("x", dst=1)
        assert len(group.isend_tensor_dict({})) == 1, "the metadata of an empty dict"
    else:
        same(group.recv_tensor_dict(src=0), hidden(9))
        assert group.recv_object(src=0) == {"a": [1, 2.5, None]}
        assert group.recv_object(src=0) == "x"
        assert group.recv_tensor_dict() == {}
    what = "sent" if group.rank_in_group == 0 else "received"
    assert ours.counts == {f"dicts {what}": 5, f"objects {what}": 2}
    assert not group._pending_isends
    groups.end(group)


def test_calls_have_the_results_that_the_engine_expects(ranks: Ranks) -> None:
    ranks.run(handles_and_results, 2)


def ring() -> None:
    group = groups.pipeline()
    groups.installed(group)
    own, size = group.rank_in_group, group.world_size
    group.isend_tensor_dict({"from": own})
    assert group.recv_tensor_dict() == {"from": (own - 1) % size}
    for rank in (own, size, -1):
        with pytest.raises(CommError, match="not another rank of the pipeline group"):
            group.isend_tensor_dict({}, dst=rank)
    groups.end(group)


def test_without_a_rank_the_next_is_sent_to_and_the_previous_received_from(ranks: Ranks) -> None:
    ranks.run(ring, 3)


def alone() -> None:
    group = groups.pipeline()
    from commlayer_vllm.install import install
    from commlayer_vllm.settings import settings_of

    assert install(group, settings_of({}, "cpu", environ={})) is None
    assert group.isend_tensor_dict(hidden(1)) == []
    assert group.irecv_tensor_dict() == (None, [], [])
    groups.end(group)


def test_in_a_world_of_one_nothing_is_installed(ranks: Ranks) -> None:
    ranks.run(alone, 1)


class OwnConstructor(GroupCoordinator):
    """As platforms do it: the attributes that they know of, without the engine's constructor."""

    def __init__(self, group_ranks: list[list[int]], **_: Any) -> None:
        self.rank = dist.get_rank()
        self.ranks = group_ranks[0]
        self.world_size = len(self.ranks)
        self.rank_in_group = self.ranks.index(self.rank)
        self.cpu_group = dist.new_group(self.ranks, backend="gloo")
        self.device_group = dist.new_group(self.ranks, backend="gloo")
        self.device_communicator = None
        self.mq_broadcaster = None


def without_constructor() -> None:
    group = groups.pipeline(OwnConstructor)
    assert not hasattr(group, "_pending_isends")
    groups.installed(group)
    if group.rank_in_group == 0:
        group.isend_tensor_dict(hidden(1))
    else:
        same(group.recv_tensor_dict(), hidden(1))
    assert not hasattr(group, "_pending_isends")
    groups.end(group)


def test_a_group_that_skips_the_constructor_serves_as_well(ranks: Ranks) -> None:
    ranks.run(without_constructor, 2)


def installs_once() -> None:
    group = groups.pipeline()
    ours = groups.installed(group)
    assert groups.installed(group) is ours
    ours.uninstall()
    for name in ("isend_tensor_dict", "irecv_tensor_dict", "isend_object", "destroy"):
        assert getattr(group, name).__func__ is getattr(GroupCoordinator, name)
    ours.wire.close()


def test_installing_twice_changes_nothing_and_uninstalling_gives_the_engine_back(
    ranks: Ranks,
) -> None:
    ranks.run(installs_once, 2)


# Receiving


def waits_where_tensors_are_used() -> None:
    group = groups.pipeline()
    groups.installed(group)
    if group.rank_in_group == 0:
        here.meet("received nothing yet")
        group.isend_tensor_dict(hidden(3))
    else:
        result, handles, calls = group.irecv_tensor_dict()
        lazy = AsyncIntermediateTensors(result, comm_handles=handles, comm_postprocess=calls)
        assert not handles[0].is_completed()
        here.meet("received nothing yet")
        same(lazy.tensors, hidden(3))
    groups.end(group)


def test_a_receive_returns_before_the_peer_sends_and_is_waited_where_it_is_used(
    ranks: Ranks,
) -> None:
    ranks.run(waits_where_tensors_are_used, 2)


def gathers_parts() -> None:
    """Two stages of two tensor-parallel ranks: 0, 1 send to 2, 3."""
    tensor_parallel = groups.make([[0, 1], [2, 3]], "tp")
    tensor_parallel.device_communicator = Gathering(tensor_parallel)
    group = groups.make([[0, 2], [1, 3]])
    groups.installed(group)
    whole = {
        "a": torch.arange(24.0).view(4, 6),
        "b": -torch.arange(10, dtype=torch.int64).view(2, 5),
        "odd": torch.arange(3.0),
        "own": torch.full((4,), float(here.rank() % 2)),
        "n": 5,
    }
    if group.rank_in_group == 0:
        handles = group.isend_tensor_dict(
            whole, all_gather_group=tensor_parallel, all_gather_tensors={"own": False, "a": True}
        )
        assert len(handles) == 5
    else:
        # The receiver is told nothing: the decision is on the wire.
        result, handles, calls = group.irecv_tensor_dict(all_gather_group=tensor_parallel)
        for handle in handles:
            handle.wait()
        assert not tensor_parallel.device_communicator.gathered
        for call in calls:
            call()
        assert tensor_parallel.device_communicator.gathered == 2
        same(result, whole)
    here.meet("end")
    groups.end(group)


class Gathering:
    """The all-gather of a device communicator, over the engine's host group."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.gathered = 0

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        self.gathered += 1
        parts = [torch.empty_like(tensor) for _ in self.group.ranks]
        dist.all_gather(parts, tensor, group=self.group.cpu_group)
        return torch.cat(parts)


def test_parts_are_gathered_late_each_under_its_own_key(ranks: Ranks) -> None:
    ranks.run(gathers_parts, 4, timeout=60)


# Sending


def sync_leaves_nothing() -> None:
    group = groups.pipeline()
    ours = groups.installed(group)
    if group.rank_in_group == 0:
        tensor = torch.ones(HUGE)
        memory = weakref.finalize(tensor.untyped_storage(), str)
        group.send_tensor_dict({"t": tensor})
        assert not ours.wire.comm.ledger.snapshot().operations  # type: ignore[attr-defined]
        assert not group._pending_isends
        del tensor
        gc.collect()
        assert not memory.alive
    else:
        assert group.recv_tensor_dict()["t"].sum() == HUGE
    groups.end(group)


def test_the_synchronous_call_leaves_nothing_behind(ranks: Ranks) -> None:
    ranks.run(sync_leaves_nothing, 2)


def sources_die() -> None:
    group = groups.pipeline()
    groups.installed(group)
    if group.rank_in_group == 0:
        tensors = [torch.ones(HUGE), torch.ones(4)]
        memory = [weakref.finalize(tensor.untyped_storage(), str) for tensor in tensors]
        handles = group.isend_tensor_dict({str(i): tensor for i, tensor in enumerate(tensors)})
        del tensors
        handles[0].wait()
        gc.collect()
        assert not any(storage.alive for storage in memory)
    else:
        assert len(group.recv_tensor_dict()) == 2
    groups.end(group)


def test_sources_are_let_go_of_once_the_metadata_handle_was_waited(ranks: Ranks) -> None:
    ranks.run(sources_die, 2)


def queue_of_sends() -> None:
    group = groups.pipeline()
    if group.rank_in_group == 1:
        groups.installed(group)
        here.say("connected")
        here.hear()
        assert group.recv_tensor_dict()["t"].sum() == HUGE
        assert group.recv_tensor_dict()["t"].sum() == HUGE
        assert group.recv_tensor_dict() == {"step": 2}
    else:
        ours = groups.installed(group)
        here.say("connected")
        here.hear()
        ledger = ours.wire.comm.ledger  # type: ignore[attr-defined]
        memory = []
        for step in range(2):
            tensor = torch.ones(HUGE)
            memory.append(weakref.finalize(tensor.untyped_storage(), str))
            group.isend_tensor_dict({"t": tensor, "step": step})
            del tensor
        group.isend_tensor_dict({"step": 2})
        gc.collect()
        assert [view.state for view in ledger.snapshot().operations] == ["pending"] * 3
        assert all(storage.alive for storage in memory)
        here.say("posted")
        ours.wire.comm.drain(30)  # type: ignore[attr-defined]
        gc.collect()
        assert not ledger.snapshot().operations
        assert not any(storage.alive for storage in memory)
    groups.end(group)


def test_nothing_of_a_queue_is_released_while_its_first_is_open_and_all_is_after(
    ranks: Ranks,
) -> None:
    sender, receiver = ranks.spawn(queue_of_sends, 2, finalize=False)
    for process in (sender, receiver):
        process.hear()
    receiver.stop()
    sender.say("the receiver is stopped")
    sender.hear()
    receiver.resume()
    receiver.say("go on")
    collect([sender, receiver])


def dropped() -> None:
    group = groups.pipeline()
    groups.installed(group)
    steps = 20
    if group.rank_in_group == 0:
        for step in range(steps):
            group.isend_tensor_dict(hidden(step, rows=600))
            gc.collect()
        group.isend_tensor_dict({"last": True})
    else:
        for step in range(steps):
            same(group.recv_tensor_dict(), hidden(step, rows=600))
        assert group.recv_tensor_dict() == {"last": True}
    groups.end(group)


def test_sends_whose_handles_are_dropped_arrive_those_of_metadata_alone_too(ranks: Ranks) -> None:
    ranks.run(dropped, 2)


def unknown_value() -> None:
    group = groups.pipeline()
    groups.installed(group)
    if group.rank_in_group == 0:
        with pytest.raises(CommError, match="allow_pickle") as caught:
            group.isend_tensor_dict({"x": object()})
        assert caught.value.kind is ErrorKind.UNSUPPORTED
        group.isend_tensor_dict(hidden(1))
    else:
        same(group.recv_tensor_dict(), hidden(1))
    groups.end(group)


def test_a_value_that_would_need_pickle_is_refused_before_it_is_sent(ranks: Ranks) -> None:
    ranks.run(unknown_value, 2)


STEPS, ROWS = 5000, 512


def resident() -> int:
    """Resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_steps(table: dict[str, Any] | None, waits: bool) -> tuple[int, int]:
    """How many sends are retained after 5,000 steps, and the growth in bytes since the 500th.

    A worker `waits` for the tensors of its last step, or drops the handles.
    """
    group = groups.pipeline()
    ours = None if table is None else groups.installed(group, **table)
    work: list[Any] = []
    before = 0
    for step in range(STEPS):
        if step % 50 == 0:
            here.meet(f"step {step}")
        if step == 500:
            before = resident()
        if group.rank_in_group == 0:
            for handle in work:
                handle.wait()
            work = group.isend_tensor_dict(
                {"hidden_states": torch.ones(ROWS, 8), "residual": torch.ones(ROWS, 8)}
            )[1:]
            work = work if waits else []
        else:
            group.recv_tensor_dict()
    for handle in work:
        handle.wait()
    here.meet("all is received")
    growth = resident() - before
    retained = len(group._pending_isends)
    if ours is not None:
        ours.wire.comm.drain(20)  # type: ignore[attr-defined]
        retained += len(ours.wire.comm.ledger.snapshot().operations)  # type: ignore[attr-defined]
    groups.end(group)
    return retained, growth


@pytest.mark.parametrize("waits", [True, False], ids=["waited", "dropped"])
def test_memory_is_flat_over_5000_steps(
    ranks: Ranks, waits: bool, record_property: Callable[[str, object], None]
) -> None:
    sent = 2 * ROWS * 8 * 4 * (STEPS - 500)
    retained, growth = ranks.run(many_steps, 2, None, waits, timeout=110)[0]
    record_property("stock", (retained, growth))
    if not waits:
        assert retained == STEPS, "the stock group keeps every send that nobody waits for"
        assert growth > sent // 2
    results = ranks.run(many_steps, 2, {}, waits, timeout=110)
    record_property("commlayer", results)
    for retained, growth in results:
        assert retained == 0
        assert growth < sent // 20


# Endings


def send_forever(group: Any, tensor: torch.Tensor) -> None:
    while True:
        for handle in group.isend_tensor_dict({"t": tensor})[1:]:
            handle.wait()


def dying_stage() -> None:
    group = groups.pipeline()
    groups.installed(group)
    here.say("connected")
    here.hear()
    if group.rank_in_group == 0:
        with pytest.raises(CommError, match="rank 1") as caught:
            send_forever(group, torch.ones(1 << 16))
        assert caught.value.kind is ErrorKind.PEER_LOST
        with pytest.raises(CommError, match="rank 1"):
            group.recv_tensor_dict()
    else:
        for _ in range(50):
            group.recv_tensor_dict()
        here.say("received")
        while True:
            group.recv_tensor_dict()


def test_the_death_of_a_stage_is_a_named_error_and_no_hang(ranks: Ranks) -> None:
    groups.killed(ranks, dying_stage)


def delivers_at_destroy() -> None:
    group = groups.pipeline()
    groups.installed(group)
    if group.rank_in_group == 0:
        group.isend_tensor_dict(hidden(1, rows=5000))
    else:
        same(group.recv_tensor_dict(), hidden(1, rows=5000))
    groups.end(group)
    assert "isend_tensor_dict" not in vars(group)


def test_destroying_the_group_delivers_what_was_sent(ranks: Ranks) -> None:
    ranks.run(delivers_at_destroy, 2)
