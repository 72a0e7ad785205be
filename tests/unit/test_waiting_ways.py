"""Awaiting, callbacks, waiting for any, and receives that are withdrawn, on every engine."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from typing import Any

import pytest
import torch
from commlayer_testkit.local import EAGER, FUNNELED, SERIALIZED, WAITED, connected

import commlayer
from commlayer import Cancelled, CommTimeout, ConfigError, Handle
from commlayer.semantics import Semantics

ENGINES = [WAITED, SERIALIZED, EAGER, FUNNELED]
IDS = ["waiter", "polling", "eager", "funneled"]
LIMIT = 30.0

engines = pytest.mark.parametrize("semantics", ENGINES, ids=IDS)
threaded = pytest.mark.parametrize("semantics", ENGINES[:3], ids=IDS[:3])


# Coroutines


@threaded
def test_a_receive_is_awaited(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):

        async def ping() -> list[Any]:
            receive = b.irecv_object(0)
            asyncio.get_running_loop().call_later(0.01, lambda: a.isend_object("hello", 1))
            sent = a.isend(torch.ones(5000), 1)
            got = b.irecv(None, 0)
            return [await receive, (await got).sum().item(), await sent]

        assert asyncio.run(asyncio.wait_for(ping(), LIMIT)) == ["hello", 5000.0, None]


@threaded
def test_a_hundred_are_awaited_at_once(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        before = threading.active_count()

        async def many() -> list[Any]:
            receives = [b.irecv_object(0) for _ in range(100)]
            waiting = asyncio.gather(*(asyncio.ensure_future(wrapped(r)) for r in receives))
            await asyncio.sleep(0)
            assert threading.active_count() <= before + 4  # no thread per wait
            for number in range(100):
                a.isend_object(number, 1)
            return list(await waiting)

        assert asyncio.run(asyncio.wait_for(many(), LIMIT)) == list(range(100))


async def wrapped(handle: Handle[Any]) -> Any:
    return await handle


@threaded
def test_a_cancelled_coroutine_leaves_the_operation(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):

        async def impatient() -> str:
            receive = b.irecv_object(0)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wrapped(receive), 0.02)
            a.isend_object("late", 1)
            return await receive

        assert asyncio.run(asyncio.wait_for(impatient(), LIMIT)) == "late"


def test_two_loops_await_one_handle() -> None:
    with connected() as (a, b):
        receive = b.irecv_object(0)
        results: list[Any] = []
        threads = [
            threading.Thread(target=lambda: results.append(asyncio.run(wrapped(receive))))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        a.isend_object("both", 1)
        for thread in threads:
            thread.join(LIMIT)
        assert results == ["both", "both"]


def test_an_error_is_raised_where_it_is_awaited() -> None:
    with connected() as (a, b):
        receive = b.irecv(torch.empty(3), 0)
        a.isend(torch.empty(4), 1)
        with pytest.raises(commlayer.ProtocolError):
            asyncio.run(asyncio.wait_for(wrapped(receive), LIMIT))


def test_a_broadcast_is_awaited_by_its_source() -> None:
    with connected(3) as comms:

        async def all_of() -> list[Any]:
            handles = [
                comm.broadcast_object("x" if comm.rank == 0 else None, 0, async_op=True)
                for comm in comms
            ]
            return [await handle for handle in handles]

        assert asyncio.run(asyncio.wait_for(all_of(), LIMIT)) == ["x", "x", "x"]


# Callbacks


@engines
def test_a_callback_runs_once_when_the_operation_is_over(semantics: Semantics) -> None:
    with connected(size=1, semantics=semantics) as (alone,):
        handle = alone.broadcast_object("x", 0, async_op=True)
        seen: list[Handle[Any]] = []
        handle.add_done_callback(seen.append)
        assert seen == [handle]


@threaded
def test_callbacks_come_from_the_library(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        receive = b.irecv_object(0)
        called, again = threading.Event(), threading.Event()
        receive.add_done_callback(lambda handle: called.set())
        assert not called.is_set()
        a.isend_object(1, 1)
        assert called.wait(LIMIT)
        receive.add_done_callback(lambda handle: again.set())
        assert again.is_set()


def test_a_callback_that_raises_is_logged_and_disturbs_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connected() as (a, b):
        receive = b.irecv_object(0)
        called = threading.Event()

        def raises(handle: Handle[Any]) -> None:
            raise ZeroDivisionError("of the caller")

        receive.add_done_callback(raises)
        receive.add_done_callback(lambda handle: called.set())
        a.isend_object(1, 1)
        assert called.wait(LIMIT)
        assert receive.result(LIMIT) == 1
        a.isend_object(2, 1)
        assert b.irecv_object(0).result(LIMIT) == 2
    assert "of the caller" in caplog.text


# Any and all


@threaded
def test_the_first_of_several_is_returned(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        waiting = [b.irecv_object(0, tag=tag) for tag in range(3)]
        with pytest.raises(CommTimeout):
            commlayer.wait_any(waiting, 0)
        a.isend_object("second", 1, tag=1)
        assert commlayer.wait_any(waiting, LIMIT) is waiting[1]
        for tag in (0, 2):
            a.isend_object(tag, 1, tag=tag)
        assert commlayer.wait_all(waiting, LIMIT) == [0, "second", 2]
        assert commlayer.wait_any(waiting, 0) is waiting[0]


def test_no_handle_is_no_wait() -> None:
    with pytest.raises(ConfigError):
        commlayer.wait_any([])
    assert commlayer.wait_all([]) == []


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(limit: float) -> None:
    with connected() as (a, b):
        with pytest.raises(ValueError, match="timeout"):
            commlayer.wait_any([a.irecv_object(1)], limit)
        b.isend_object(1, 0)


# Withdrawing


@threaded
def test_a_withdrawn_receive_leaves_the_message_to_the_next(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        first, second = b.irecv_object(0), b.irecv_object(0)
        assert first.cancel()
        assert not first.cancel()
        with pytest.raises(Cancelled):
            first.result(LIMIT)
        a.isend_object("message", 1)
        assert second.result(LIMIT) == "message"
        assert not second.cancel()
        assert second.result(0) == "message"
        assert [o for o in b.ledger.snapshot().operations if o.state == "pending"] == []


def test_only_a_receive_that_waits_is_withdrawn() -> None:
    with connected() as (a, b):
        send = a.isend(torch.ones(5000), 1)
        assert not send.cancel()
        broadcast = b.broadcast(None, 0, async_op=True)
        assert not broadcast.cancel()
        a.broadcast(torch.ones(3), 0)
        assert broadcast.result(LIMIT).sum() == 3
        assert b.recv(None, 0).sum() == 5000


@threaded
def test_a_retry_loop_loses_no_message(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        got = []
        for number in range(3):
            for _ in range(3):
                with pytest.raises(CommTimeout):
                    b.recv_object(0, timeout=0.01)
            a.isend_object(number, 1)
            got.append(b.recv_object(0, timeout=LIMIT))
        assert got == [0, 1, 2]
        with pytest.raises(CommTimeout):
            b.recv(None, 0, timeout=0)
        with pytest.raises(CommTimeout):
            b.recv_tensor_dict(0, timeout=0)


def test_a_send_that_is_too_late_is_waited_for_again() -> None:
    with connected() as (a, b):
        with pytest.raises(CommTimeout) as caught:
            a.send(torch.ones(5000), 1, timeout=0.01)
        assert b.recv(None, 0).sum() == 5000
        caught.value.handle.wait(LIMIT)


def test_a_dropped_receive_that_takes_a_message_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with connected() as (a, b), caplog.at_level(logging.WARNING, "commlayer"):
        for _ in range(3):
            b.irecv_object(0)
        gc.collect()
        for number in range(4):
            a.isend_object(number, 1)
        assert b.recv_object(0, timeout=LIMIT) == 3
    said = [record for record in caplog.records if "nobody can get" in record.getMessage()]
    assert len(said) == 1
    assert "channel data" in said[0].getMessage()
    assert "sequence 0" in said[0].getMessage()


def test_handles_are_handles() -> None:
    with connected() as (a, b):
        handles = [a.isend(torch.ones(1), 1), b.irecv(None, 0)]
        assert all(isinstance(handle, Handle) for handle in handles)
        commlayer.wait_all(handles, LIMIT)
