"""The arena's allocator, streams and events."""

from __future__ import annotations

import torch
from commlayer_testkit.sim import FailureKind, Rank, World, profile
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.memory import POISON


def play(body: object) -> World:
    world = World(ReplayChoices(), profile("hccl"))
    try:
        world.start(1, body)  # type: ignore[arg-type]
        world.run()
    finally:
        world.close()
    return world


def check(body: object) -> None:
    failure = play(body).failure
    assert failure is None, str(failure)


def test_a_freed_block_is_reused_at_once_last_in_first_out() -> None:
    def body(rank: Rank) -> None:
        first, second = rank.arena.empty(8), rank.arena.empty(8)
        addresses = [first.data_ptr(), second.data_ptr()]
        del first, second
        again = [rank.arena.empty(8), rank.arena.empty(8)]
        assert [t.data_ptr() for t in again] == addresses[::-1]

    check(body)


def test_a_view_keeps_its_block() -> None:
    def body(rank: Rank) -> None:
        tensor = rank.arena.empty(4, 4, dtype=torch.float32)
        view = tensor[1]
        address = tensor.data_ptr()
        del tensor
        assert rank.arena.empty(4, 4, dtype=torch.float32).data_ptr() != address
        del view
        assert rank.arena.empty(4, 4, dtype=torch.float32).data_ptr() == address

    check(body)


def test_pools_belong_to_streams() -> None:
    def body(rank: Rank) -> None:
        tensor = rank.arena.empty(8)
        address = tensor.data_ptr()
        del tensor
        with rank.device.stream():
            assert rank.arena.empty(8).data_ptr() != address

    check(body)


def test_freed_memory_is_poisoned() -> None:
    def body(rank: Rank) -> None:
        tensor = rank.arena.full(1, 8)
        rank.device.synchronize()
        assert tensor.tolist() == [1] * 8
        del tensor
        assert rank.arena.empty(8).tolist() == [POISON] * 8

    check(body)


def test_a_recorded_block_comes_back_when_the_stream_is_done() -> None:
    def body(rank: Rank) -> None:
        device, arena = rank.device, rank.arena
        side = device.stream("side")
        tensor = arena.full(1, 8)
        address = tensor.data_ptr()
        device.synchronize()
        with side:
            device.launch("read", lambda t: None, reads=[tensor])
        device.record_stream(tensor, side)
        del tensor
        assert arena.empty(8).data_ptr() != address
        side.synchronize()
        assert arena.empty(8).data_ptr() == address
        device.synchronize()
        assert arena.in_use == 0

    check(body)


def test_a_free_that_is_ordered_after_the_reader_is_fine() -> None:
    """The main stream waits for the side stream before the block is freed and reused."""

    def body(rank: Rank) -> None:
        device, arena = rank.device, rank.arena
        side = device.stream("side")
        tensor = arena.full(1, 8)
        side.wait_stream(device.current_stream())
        with side:
            device.launch("read", lambda t: None, reads=[tensor])
        device.current_stream().wait_stream(side)
        del tensor
        arena.full(2, 8)
        device.synchronize()

    check(body)


def test_events_order_streams_and_answer_queries() -> None:
    order: list[str] = []

    def body(rank: Rank) -> None:
        device = rank.device
        side = device.stream("side")
        event = device.event()
        device.launch("first", lambda: order.append("first"))
        event.record()
        side.wait_event(event)
        with side:
            device.launch("second", lambda: order.append("second"))
        assert not event.query()
        event.synchronize()
        assert event.query()
        side.synchronize()
        assert side.query()

    check(body)
    assert order == ["first", "second"]


def test_the_current_stream_is_the_tasks() -> None:
    def body(rank: Rank) -> None:
        device = rank.device
        side = device.stream("side")
        seen = []

        def helper() -> None:
            seen.append(device.current_stream())

        with side:
            rank.spawn(helper, "helper").join()
            assert device.current_stream() is side
        assert seen == [device.default_stream]
        assert device.current_stream() is device.default_stream

    check(body)


def test_a_kernel_on_freed_memory_is_reported() -> None:
    def body(rank: Rank) -> None:
        device, arena = rank.device, rank.arena
        tensor = arena.empty(8)
        with device.stream():
            device.launch("late", lambda t: None, reads=[tensor])
        del tensor
        device.synchronize()

    failure = play(body).failure
    assert failure is not None
    assert failure.kind is FailureKind.USE_AFTER_FREE
    assert "late" in failure.what
