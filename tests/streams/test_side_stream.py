"""Work on a side stream, with what it reads kept alive by ``uses=``."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import pytest
import torch
from commlayer_testkit.local import connected
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.mount_core import connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank
from exploring import searched, survives

from commlayer import CommError, ErrorKind
from commlayer.device.side_stream import SideStreams

DEVICE = ("hccl", "nccl", "xccl")


def gather(source: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(source[index.long()])


def drafts(rank: Rank, *, listed: bool) -> None:
    """Two steps: an index made on the main stream, read on the side stream, and dropped."""
    comm = connect_device(rank, GLOO)
    device, arena = rank.device, rank.arena
    for step in range(2):
        if rank.index == 0:
            source = arena.full(40 + step, 4)
            index = arena.full(step, 4)
            with comm.side_stream(uses={"step": [(index,)]} if listed else ()) as side:
                out = arena.empty(4)
                device.launch("gather", gather, reads=[source, index], writes=[out])
                handle = side.broadcast(out, 0, async_op=True)
            del index, out
            arena.full(200, 4)
            handle.synchronize()
        else:
            with comm.side_stream() as side:
                handle = side.broadcast(None, 0, async_op=True)
            got = handle.result()
            taken = arena.empty(4)
            device.launch("take", lambda a, b: b.copy_(a), reads=[got], writes=[taken])
            device.current_stream().synchronize()
            assert taken.tolist() == [40 + step] * 4
            del got, taken
        del handle
    comm.close(30)
    device.synchronize()
    assert not comm.ledger.snapshot().operations


@pytest.mark.parametrize("on", DEVICE)
def test_listed_tensors_survive(on: str) -> None:
    survives(partial(drafts, listed=True), on, budget=25)


@pytest.mark.parametrize("on", DEVICE)
def test_without_uses_the_arena_reports_the_early_reuse(on: str) -> None:
    report = searched(partial(drafts, listed=False), on, budget=300)
    assert report.failure is not None, str(report)
    assert report.failure.kind is FailureKind.USE_AFTER_FREE, str(report)


def staged(rank: Rank, *, listed: bool) -> None:
    """A copy from host memory that is dropped at once."""
    comm = connect_device(rank, GLOO)
    staging = torch.full((16,), 7, dtype=torch.uint8)
    into = rank.arena.empty(16)
    with comm.side_stream(uses=[staging, into] if listed else into):
        rank.device.launch("copy", lambda a, b: b.copy_(a), reads=[staging], writes=[into])
    for held in comm.ledger.snapshot().operations:
        assert (held.kind, held.nbytes) == ("track", 16)
    del staging
    rank.device.synchronize()
    assert into.tolist() == [7] * 16
    while comm.ledger.snapshot().operations:
        rank.sleep(0.001)
    comm.close(30)


@pytest.mark.parametrize("listed", [True, False])
def test_host_tensors_are_held_until_the_side_stream_is_done(listed: bool) -> None:
    report = searched(partial(staged, listed=listed), "nccl", ranks=1, budget=50)
    if listed:
        assert report.failure is None, str(report)
    else:
        assert report.failure is not None
        assert report.failure.kind is FailureKind.USE_AFTER_FREE, str(report)


# Containers, and the mode that checks -----------------------------------------------------------


class Stream:
    def __init__(self, device: Device) -> None:
        self._device = device

    def __enter__(self) -> Stream:
        self._before, self._device.current = self._device.current, self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._device.current = self._before


class Event:
    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Device:
    """A device of streams that do nothing, whose memory is all of torch's CPU memory but `host`."""

    def __init__(self) -> None:
        self.current: Any = Stream(self)
        self.host: set[int] = set()
        self.recorded: list[tuple[torch.Tensor, Any]] = []

    def stream(self) -> Stream:
        return Stream(self)

    def event(self) -> Event:
        return Event()

    def current_stream(self) -> Any:
        return self.current

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in self.host

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        self.recorded.append((tensor, stream))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        into.copy_(source)

    def capturing(self) -> bool:
        return False


def never(event: Any, tensors: Any) -> None:
    raise AssertionError("no host tensor was used")


@dataclass
class Step:
    index: torch.Tensor
    width: int
    more: Any = None


def test_uses_are_found_in_nested_containers_and_recorded_once_per_entry() -> None:
    device = Device()
    held: list[Any] = []
    streams = SideStreams(device, lambda event, tensors: held.append(tensors), check=False)
    a, b, c, d, e = (torch.zeros(1) for _ in range(5))
    device.host.add(e.data_ptr())
    uses: list[Any] = [
        a,
        {"b": (b, None, "text")},
        OrderedDict(c=Step(c, 3, {"d": frozenset([d])})),
    ]
    uses += [e, uses, 1.5, torch.float16]
    with streams.enter(uses):
        side = device.current
        assert {id(tensor) for tensor, _ in device.recorded} == {id(t) for t in (a, b, c, d)}
        assert all(stream is side for _, stream in device.recorded)
        assert held == []
        with streams.enter(()):
            assert device.current is not side
    assert held == [[e]]
    assert device.current is not side
    with streams.enter(a):
        assert device.current is not None
    assert len(device.recorded) == 5


def test_an_object_that_may_hide_tensors_is_refused() -> None:
    class Batch:
        index = torch.zeros(1)

    streams = SideStreams(Device(), never, check=False)
    with (
        pytest.raises(CommError, match="Batch, which may hold tensors") as caught,
        streams.enter([{"batch": Batch()}]),
    ):
        raise AssertionError("entered")
    assert caught.value.kind is ErrorKind.CONFIG


def test_the_stream_is_left_when_the_block_raises() -> None:
    device = Device()
    before = device.current
    with pytest.raises(KeyError), SideStreams(device, never, check=True).enter(()):
        raise KeyError
    assert device.current is before
    torch.zeros(2).add_(1)


def test_the_check_names_an_unlisted_tensor_and_the_operation() -> None:
    streams = SideStreams(Device(), never, check=True)
    drafts, index = torch.arange(10), torch.tensor([3, 1])
    with (
        streams.enter([drafts]),
        pytest.raises(CommError, match=r"aten\.index.*int64 tensor of shape \[2\]") as caught,
    ):
        drafts[index]
    assert caught.value.kind is ErrorKind.LIFETIME
    with streams.enter([drafts, {"index": index}]):
        assert drafts[index].tolist() == [3, 1]


def test_the_check_follows_memory_not_objects() -> None:
    streams = SideStreams(Device(), never, check=True)
    outside, listed = torch.arange(12.0), torch.arange(12.0)
    with streams.enter(listed):
        made = listed[2:6] * 2
        made.view(2, 2).t().contiguous().add_(1)
        view = outside.view(3, 4)[1]
        with pytest.raises(CommError, match=r"float32 tensor of shape \[4\]"):
            made + view
        with pytest.raises(CommError, match=r"aten\.copy_"):
            outside.copy_(listed)
    assert (made + view).tolist() == [8, 11, 14, 17]
    with streams.enter(view):
        assert outside.sum().item() == 66


def test_the_check_looks_at_the_device_and_the_side_stream_only() -> None:
    device = Device()
    streams = SideStreams(device, never, check=True)
    host, outside = torch.ones(2), torch.ones(3)
    device.host.add(host.data_ptr())
    main = device.current
    with streams.enter(()):
        side = device.current
        assert (host + 1).tolist() == [2, 2]
        device.current = main
        assert outside.sum() == 3
        device.current = side
        with pytest.raises(CommError, match=r"aten\.sum"):
            outside.sum()


def test_the_check_accepts_what_was_recorded_inside() -> None:
    """As results of handles are; torch's CPU memory has no streams, the record itself is seen."""
    streams = SideStreams(Device(), never, check=True)
    outside = torch.ones(3)
    with streams.enter(()):
        with pytest.raises(CommError):
            outside.sum()
        with pytest.raises(NotImplementedError):
            outside.record_stream(torch.Stream(stream_id=0, device_index=0, device_type=1))
        assert outside.sum() == 3


def test_without_a_device_the_block_runs_on_the_host() -> None:
    with connected(check_lifetime=True) as comms:
        value = torch.arange(4)
        with comms[0].side_stream(uses=[value]) as side:
            handle = side.broadcast(value * 2, 0, async_op=True)
        with comms[1].side_stream() as side:
            assert side.broadcast(None, 0).tolist() == [0, 2, 4, 6]
        handle.wait(20)
        with (
            pytest.raises(CommError, match="may hold tensors"),
            comms[0].side_stream(uses=[object()]),
        ):
            pass
