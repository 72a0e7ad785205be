"""What is posted ahead and named, end to end, and what a message costs, counted."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bits import without_memory
from commlayer_testkit.local import (
    WAITED,
    Hub,
    LocalBackend,
    LocalEndpoint,
    connect_rank,
    connected,
    eventually,
    on_every_rank,
)
from torch import Tensor

from commlayer.backend import World
from commlayer.bootstrap.connector import connect_world
from commlayer.communicator import Communicator
from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.loading import LoadedBackend
from commlayer.progress.runtime import ThreadRuntime
from commlayer.registry import Registry
from commlayer.wire import message
from commlayer.wire.frame import UNSLOTTED, Kind
from commlayer.wire.message import encode_body, encode_prefix, encode_shape
from commlayer.wire.tags import OBJECTS, TagMap
from commlayer.wire.tensors import TensorMeta

INLINE = 64


def decode_step(step: int, elements: int = 100) -> dict[str, Tensor]:
    return {name: torch.full((elements,), float(step)) for name in ("hidden", "residual")}


def exchange(comm: Communicator, steps: int = 12) -> None:
    """Repeating dicts with payload both ways, other shapes and plain values in between."""
    peer = 1 - comm.rank
    for step in range(steps):
        comm.isend_tensor_dict(decode_step(step), peer)
        comm.isend_tensor_dict({"prompt": torch.full((200 + step,), 1.0 * step), "n": step}, peer)
        comm.isend_tensor_dict({**decode_step(step, 50), "step": step}, peer)
        for elements, extra in ((100, {}), (50, {"step": step})):
            received = comm.recv_tensor_dict(peer)
            assert [(n, t.tolist()) for n, t in received.items() if isinstance(t, Tensor)] == [
                (name, [step] * elements) for name in ("hidden", "residual")
            ]
            assert extra.items() <= received.items()
            if not extra:
                assert comm.recv_tensor_dict(peer)["prompt"].numel() == 200 + step


@pytest.mark.parametrize("mode", ["safe", "direct"])
@pytest.mark.parametrize(
    "settings",
    [
        ({}, {}),
        ({"headers_ahead": 1, "payloads_ahead": 0}, {}),
        ({"headers_ahead": 8, "payloads_ahead": 1}, {"headers_ahead": 1}),
    ],
    ids=["alike", "one with nothing ahead", "different"],
)
def test_ranks_that_receive_ahead_differently_understand_each_other_and_part(
    settings: tuple[dict[str, Any], dict[str, Any]], mode: str
) -> None:
    hub = Hub(2)

    def body(rank: int) -> None:
        config = {"inline_bytes": INLINE, "wait_mode": mode, **settings[rank]}
        with connect_rank(hub, rank, **config) as comm:
            exchange(comm)
            exchange(comm)

    on_every_rank(hub, body)
    assert hub.violations == []
    assert hub.closed == {0: 1, 1: 1}, "a receive that was posted ahead was not completed"


def test_a_slot_that_changes_hands_completes_what_was_posted_ahead() -> None:
    hub = Hub(2)

    def body(rank: int) -> None:
        with connect_rank(hub, rank, inline_bytes=INLINE, payloads_ahead=1) as comm:
            for elements, count in ((100, 5), (300, 60), (100, 60)):
                for step in range(count):
                    if rank == 0:
                        comm.isend_tensor_dict(decode_step(step, elements), 1)
                    else:
                        received = comm.recv_tensor_dict(0)
                        assert received["residual"].tolist() == [step] * elements

    on_every_rank(hub, body)
    assert hub.violations == []
    assert hub.closed == {0: 1, 1: 1}


def test_repeated_values_are_fresh_objects_each_time() -> None:
    with connected(inline_bytes=INLINE) as (a, b):
        value = {"t": torch.ones(3), "list": [1, 2]}
        received = []
        for _ in range(4):
            a.isend_tensor_dict(value, 1)
            received.append(b.recv_tensor_dict(0))
            received[-1]["list"].append(3)
            received[-1]["t"] += 1
        assert all(r["list"] == [1, 2, 3] and r["t"].tolist() == [2, 2, 2] for r in received)
        assert len({r["t"].data_ptr() for r in received}) == 4


def test_a_dict_that_looks_like_one_before_is_checked_all_the_same() -> None:
    class Strict(dict[str, Any]):
        pass

    plain = {"t": torch.ones(3)}
    with connected(inline_bytes=INLINE) as (a, b):
        for _ in range(3):
            a.isend_tensor_dict(plain, 1)
            b.recv_tensor_dict(0)
        for odd in (
            {"t": torch.sparse_coo_tensor(size=(3,))},
            {"t": torch.empty(3, device="meta")},
            {"t": without_memory(0)},
            {"t": without_memory(16)},
        ):
            with pytest.raises(CommError) as caught:
                a.isend_tensor_dict(odd, 1)
            assert caught.value.kind is ErrorKind.UNSUPPORTED
        for alike in (
            torch.arange(6.0)[::2],
            torch.arange(3.0).requires_grad_(),
            torch.nn.Parameter(torch.arange(3.0)),
            torch.complex(torch.zeros(3), -torch.arange(3.0)).conj().imag,
        ):
            a.isend_tensor_dict({"t": alike}, 1)
            assert torch.equal(b.recv_tensor_dict(0)["t"], alike.detach())
        a.isend_tensor_dict(Strict(plain), 1)
        assert torch.equal(b.recv_tensor_dict(0)["t"], plain["t"])
        twice = torch.ones(3)
        for _ in range(3):
            a.isend_tensor_dict({"x": twice, "y": twice}, 1)
            received = b.recv_tensor_dict(0)
            assert received["x"] is received["y"]


# A peer that uses slots as it likes


def hostile_frames() -> dict[str, list[tuple[bytes, int]]]:
    """Native messages, each with its slot."""
    meta = TensorMeta("float32", (100,), "cpu")
    shape = encode_shape((meta,), b"\x02", -1)
    body = encode_body(shape, b"\x92\xc7\x04\x06\x00\x00\x00\x00")

    def head(slot: int, schema: int, flags: int, content: bytes, sequence: int = 0) -> bytes:
        return encode_prefix(Kind.TENSOR_DICT, flags, slot, sequence, -1, schema, content, 0)

    return {
        "a slot beyond those offered": [(head(7, 1, 2, body) + body, 0)],
        "no slot for payload": [(head(0, 1, 2, body) + body, 0)],
        "a schema nobody defined": [(head(UNSLOTTED, 9, 0, b""), 0)],
        "a name with a body": [
            (head(UNSLOTTED, 1, 2, _one_inline()) + _one_inline(), 0),
            (head(UNSLOTTED, 1, 0, b"x", 1) + b"x", 0),
        ],
        "a large slot": [(head(2, 1, 2, _large()) + _large(), 0)],
    }


def _one_inline() -> bytes:
    return encode_body(encode_shape((), b"", -1), b"\x91\x01")


def _large() -> bytes:
    return encode_body(
        encode_shape((TensorMeta("float32", (1 << 21,), "cpu"),), b"\x02", -1), b"\x91\x01"
    )


@pytest.mark.parametrize("name", hostile_frames())
def test_a_peer_cannot_use_slots_or_names_that_it_has_not(name: str) -> None:
    hub = Hub(2)
    with connected(hub=hub, inline_bytes=INLINE, payloads_ahead=2, close_timeout=0.5) as (a, _):
        handle = a.irecv_tensor_dict(1)
        kept = []
        for message, slot in hostile_frames()[name]:
            native = TagMap.payload(TagMap(()).native("data", OBJECTS), slot)
            tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            kept.append(hub.post("send", 1, 0, native, tensor))
        with pytest.raises(CommError) as caught:
            handle.wait(30)
        assert caught.value.kind is ErrorKind.PROTOCOL


# What a message costs


class CountingEvent(threading.Event):
    """Counts the waits that blocked; the pause of a send lane lasts until it is woken."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def wait(self, timeout: float | None = None) -> bool:
        if self.is_set():
            return True
        task = threading.current_thread().name
        name = "caller" if task == "MainThread" else "lane"
        woken = super().wait(60 if task.startswith("commlayer send") else timeout)
        self._counts[f"{name} woken"] += 1
        return woken


class CountingRuntime(ThreadRuntime):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def event(self) -> threading.Event:
        return CountingEvent(self.counts)


@contextmanager
def counted(**settings: Any) -> Iterator[tuple[Hub, list[Communicator], list[Counter[str]]]]:
    """Two connected ranks whose thread wake-ups are counted."""
    hub, runtimes = Hub(2), [CountingRuntime(), CountingRuntime()]
    config = CommConfig(connect_timeout=20.0, close_timeout=5.0, **settings)

    def connect(rank: int) -> Communicator:
        return connect_world(
            World(rank, 2, hub.store, 20.0),
            LoadedBackend(LocalBackend(hub, WAITED), "tests", ""),
            config,
            registry=Registry(entry_points=[]),
            runtime=runtimes[rank],
        )

    comms = on_every_rank(hub, connect)
    yield hub, comms, [runtime.counts for runtime in runtimes]
    on_every_rank(hub, lambda rank: comms[rank].close())
    assert hub.violations == []


SMALL, LARGE = 256, 1 << 17


def warmed(comms: list[Communicator], elements: int) -> dict[str, Tensor]:
    a, b = comms
    source = decode_step(0, elements)
    for _ in range(5):
        a.isend_tensor_dict(source, 1)
        b.recv_tensor_dict(0)
    return source


@pytest.mark.parametrize(("elements", "natives"), [(SMALL, 1), (LARGE, 3)])
def test_native_operations_of_a_repeated_dict(elements: int, natives: int) -> None:
    with counted() as (hub, comms, _):
        source = warmed(comms, elements)
        before = hub.posted.copy()
        for _ in range(20):
            comms[0].isend_tensor_dict(source, 1)
            comms[1].recv_tensor_dict(0)
        posted = hub.posted - before
    assert posted["send"] == 20 * natives
    assert 19 * natives <= posted["recv"] <= 21 * natives, "those ahead may come a moment later"


def test_a_send_that_nobody_asks_about_wakes_nobody() -> None:
    with counted() as (_, comms, counts):
        source = warmed(comms, SMALL)
        before = counts[0]["lane woken"]
        handles = [comms[0].isend_tensor_dict(source, 1) for _ in range(100)]
        assert counts[0]["lane woken"] == before
        for _ in handles:
            comms[1].recv_tensor_dict(0)
        assert counts[0]["lane woken"] == before
        comms[0].drain(30)
        assert counts[0]["lane woken"] <= before + 2
        assert all(handle.is_completed() for handle in handles)


def test_a_wait_crosses_threads_once_and_a_direct_one_never() -> None:
    for mode, crossings in (("safe", 1), ("direct", 0)):
        with counted(wait_mode=mode) as (_, comms, counts):
            source = warmed(comms, SMALL)
            counts[1].clear()
            for _ in range(20):
                receive = comms[1].irecv_tensor_dict(0)
                comms[0].isend_tensor_dict(source, 1)
                receive.result()
            woken = counts[1].copy()
        assert woken["caller woken"] <= 20 * crossings, mode


def test_copies_and_allocations_of_a_repeated_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    copied: list[int] = []
    real_move, real_view = ctypes.memmove, message.bytes_of

    def memmove(target: int, source: Any, size: int) -> int:
        copied.append(size)
        return real_move(target, source, size)

    def bytes_of(tensor: Tensor) -> memoryview:
        copied.append(tensor.nbytes)
        return real_view(tensor)

    def counting(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def counted(*args: Any, **options: Any) -> Tensor:
            counts["allocations"] += 1
            return make(*args, **options)

        return counted

    with counted() as (_, comms, _), monkeypatch.context() as patch:
        large, small = warmed(comms, LARGE), warmed(comms, SMALL)
        lane = comms[1]._connection.peers[0].receives["data", OBJECTS]
        assert eventually(lambda: lane._reader._fresh is not None)
        sent: list[int] = []
        whole = LocalEndpoint.isend
        patch.setattr(
            LocalEndpoint,
            "isend",
            lambda self, tensor, *to: sent.append(tensor.data_ptr()) or whole(self, tensor, *to),
        )
        patch.setattr(torch, "empty", counting(torch.empty))
        patch.setattr(torch, "frombuffer", counting(torch.frombuffer))
        patch.setattr(ctypes, "memmove", memmove)
        patch.setattr(message, "bytes_of", bytes_of)
        comms[0].isend_tensor_dict(small, 1)
        comms[1].recv_tensor_dict(0)
        assert eventually(lambda: counts["allocations"] == 3), "the header, and two for the next"
        assert [size for size in copied if size == 4 * SMALL] == [4 * SMALL] * 4
        del copied[:], sent[:]
        comms[0].isend_tensor_dict(large, 1)
        assert {tensor.data_ptr() for tensor in large.values()} <= set(sent)
        assert comms[1].recv_tensor_dict(0)["residual"].numel() == LARGE
        assert sum(copied) < 4 * LARGE
