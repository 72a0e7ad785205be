"""Tensor dicts in slices, between two stages of two tensor-parallel ranks each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import same
from ranks import here
from ranks.pool import Ranks

import commlayer
from commlayer import CommError, CommTimeout, Communicator, ErrorKind
from commlayer.pipeline.slices import Slice

TP = 2


def stages(**settings: Any) -> tuple[Communicator, Communicator, int]:
    """The tensor-parallel and the pipeline communicator of this rank, and its rank of all."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = [
        dist.new_group(members, use_local_synchronization=True)
        for members in ([rank // TP * TP, rank // TP * TP + 1], [rank % TP, rank % TP + TP])
    ]
    config = {"backend": "gloo", "connect_timeout": 20.0, **settings}
    tp, pp = (commlayer.connect(config, group=group) for group in groups)
    return tp, pp, rank


def end(tp: Communicator, pp: Communicator) -> None:
    pp.drain(20)
    tp.drain(20)
    snapshot = tp.ledger.snapshot()
    assert (snapshot.sends, snapshot.bytes) == (0, 0)
    tp.broadcast_object(None, 0)
    pp.close()
    tp.close()
    dist.destroy_process_group()


def activations(step: int, tp_rank: int) -> dict[str, Any]:
    torch.manual_seed(step)
    hidden = torch.randn(64, 96)
    return {
        "hidden": hidden,
        "half": hidden.to(torch.bfloat16),
        "fp8": hidden.to(torch.float8_e4m3fn),
        "int16": torch.arange(6, dtype=torch.int16).view(2, 3) + step,
        "mask": hidden > 0,
        "complex": torch.complex(hidden, -hidden),
        "transposed": hidden.t(),
        "odd": torch.arange(7.0) + step,
        "scalar": torch.tensor(step),
        "empty": torch.empty(0, 4),
        "residual": torch.full((8, 2), 10.0 * step + tp_rank),
        "nested": [torch.full((4,), float(step))],
        "step": step,
    }


def arrived(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return all(map(arrived, got, expected))
    if isinstance(expected, torch.Tensor):
        return got.is_contiguous() and same(got, expected)
    return bool(got == expected)


def every_dtype() -> None:
    tp, pp, _ = stages()
    replicated = {"residual": False, "absent": True}
    if pp.rank == 0:
        for step in range(3):
            pp.isend_tensor_dict(activations(step, tp.rank), 1, tp, replicated)
    else:
        for step in range(3):
            expected = activations(step, tp.rank)
            got = pp.recv_tensor_dict(0, tp, replicated)
            assert list(got) == list(expected)
            for key, value in expected.items():
                assert arrived(got[key], value), key
    end(tp, pp)


def test_sliced_dicts_arrive_whole(ranks: Ranks) -> None:
    ranks.run(every_dtype, 4)


def halves_travel() -> None:
    tp, pp, _ = stages()
    elements = 1 << 16
    if pp.rank == 0:
        send = pp.isend_tensor_dict(
            {"a": torch.ones(elements), "b": torch.ones(elements), "c": torch.ones(3)},
            1, tp, {"b": False},
        )  # fmt: skip
        (view,) = (v for v in pp.ledger.snapshot().operations if v.direction == "send")
        # Half of a, all of b and c, and a header.
        payload = elements * 4 // TP + elements * 4 + 12
        assert payload <= view.nbytes < payload + 4096
        here.meet("looked", of=4)
        send.wait(20)
    else:
        here.meet("looked", of=4)
        got = pp.irecv_tensor_dict(0)
        with pytest.raises(CommError, match=r"part . of 2.*no all_gather_group") as caught:
            got.result(20)
        assert caught.value.kind is ErrorKind.PROTOCOL
    end(tp, pp)


def test_a_part_is_sent_and_needs_a_group_to_receive_it(ranks: Ranks) -> None:
    ranks.run(halves_travel, 4)


def any_order() -> None:
    tp, pp, _ = stages()
    tensors = [{"x": torch.arange(1 << 12) + step} for step in range(4)]
    if pp.rank == 0:
        for value in tensors:
            pp.isend_tensor_dict(value, 1, tp)
    else:
        handles = [pp.irecv_tensor_dict(0, tp) for _ in tensors]
        order = [0, 1, 2, 3] if tp.rank == 0 else [3, 1, 0, 2]
        for index in order:
            assert torch.equal(handles[index].result(20)["x"], tensors[index]["x"])
            assert handles[index].is_completed()
            assert handles[index].exception() is None
        assert handles[0].result(0) is handles[0].result()
    end(tp, pp)


def test_ranks_may_wait_in_different_orders(ranks: Ranks) -> None:
    ranks.run(any_order, 4)


def polled() -> None:
    tp, pp, _ = stages()
    if pp.rank == 0:
        if tp.rank == 1:
            tp.recv_object(0)
        pp.isend_tensor_dict({"x": torch.arange(8)}, 1, tp)
        if tp.rank == 0:
            tp.send_object("go", 1)
    else:
        handle = pp.irecv_tensor_dict(0, tp)
        if tp.rank == 1:
            with pytest.raises(CommTimeout):
                handle.wait(0)
        while not handle.is_completed():
            pass
        assert torch.equal(handle.result(0)["x"], torch.arange(8))
    end(tp, pp)


def test_completion_shows_to_polling_and_a_timeout_changes_nothing(ranks: Ranks) -> None:
    ranks.run(polled, 4)


def checked() -> None:
    tp, pp, _ = stages(check_slices=True, full_timeout=20.0)
    value = {"hidden": torch.ones(64), "residual": torch.full((8,), float(tp.rank))}
    if pp.rank == 0:
        with pytest.raises(CommError, match=r"'residual'.*not replicated") as caught:
            pp.isend_tensor_dict(value, 1, tp)
        assert caught.value.kind is ErrorKind.CONFIG
        pp.isend_tensor_dict(value, 1, tp, {"residual": False}).wait(20)
    else:
        got = pp.irecv_tensor_dict(0, tp).result(20)
        assert torch.equal(got["residual"], value["residual"])
    end(tp, pp)


def test_a_false_claim_is_detected_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(checked, 4)


def wrong_group() -> None:
    """The whole world receives what a group of two sent; one part does not come at all."""
    tp, pp, rank = stages()
    world = commlayer.connect({"backend": "gloo", "connect_timeout": 20.0}, group=dist.group.WORLD)
    if pp.rank == 0:
        pp.isend_tensor_dict({"x": torch.ones(8)}, 1, tp).wait(20)
        if tp.rank == 0:
            pp.isend_tensor_dict({"x": torch.ones(8)}, 1, tp).wait(20)
        else:
            pp.isend_object("not a tensor dict", 1).wait(20)
    else:
        handle = pp.irecv_tensor_dict(0, world)
        for _ in range(2):
            with pytest.raises(CommError, match=r"in 2 parts.*has 4 ranks") as caught:
                handle.result(20)
            assert caught.value.kind is ErrorKind.CONFIG
        assert handle.is_completed()
        assert handle.exception() is not None
        broken = pp.irecv_tensor_dict(0, tp)
        cause = "rank 1 of all_gather_group has no part" if rank == 2 else "receives a tensor dict"
        with pytest.raises(CommError, match=cause):
            broken.result(20)
    world.broadcast_object(None, 0)
    world.close()
    end(tp, pp)


def test_a_group_of_another_size_and_a_missing_part_are_errors(ranks: Ranks) -> None:
    ranks.run(wrong_group, 4)


def forged() -> None:
    tp, pp, _ = stages()
    if pp.rank == 0:
        pp.isend_tensor_dict({"x": Slice(torch.ones(3), (8,), 0, 2)}, 1).wait(20)
        pp.isend_tensor_dict({"x": Slice(torch.ones(4), (8,), 0, 2)}, 1).wait(20)
        pp.isend_tensor_dict({"x": torch.ones(2)}, 1).wait(20)
    else:
        for words in ("contradicts itself", "not parts of one tensor"):
            with pytest.raises(CommError, match=words) as caught:
                pp.irecv_tensor_dict(0, tp).result(20)
            assert caught.value.kind is ErrorKind.PROTOCOL
        assert pp.irecv_tensor_dict(0, tp).result(20)["x"].tolist() == [1, 1]
    end(tp, pp)


def test_slices_that_make_no_sense_fail_their_own_receive_only(ranks: Ranks) -> None:
    ranks.run(forged, 4)


def no_group() -> None:
    tp, pp, _ = stages()
    with pytest.raises(CommError, match="all_gather_group is a ProcessGroup"):
        pp.isend_tensor_dict({}, 1 - pp.rank, dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(CommError, match="all_gather_tensors is a list"):
        pp.isend_tensor_dict({}, 1 - pp.rank, tp, ["x"])  # type: ignore[arg-type]
    if pp.rank == 0:
        pp.send_tensor_dict({"x": torch.ones(2)}, 1, None, {"x": True})
    else:
        assert pp.recv_tensor_dict(0, None, {"x": True})["x"].tolist() == [1, 1]
    end(tp, pp)


def test_without_a_group_everything_is_sent_whole(ranks: Ranks) -> None:
    ranks.run(no_group, 4)
