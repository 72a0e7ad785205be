"""Timeouts, Ctrl-C, use after close: a handle answers the same however it is asked."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommError, CommTimeout, ErrorKind

LARGE = 1 << 18


def waits_twice() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    handles = [
        comm.irecv(None, peer),
        comm.irecv_object(peer),
        comm.broadcast(torch.arange(3), 0, async_op=True),
        comm.isend(torch.ones(LARGE), peer),
        comm.isend_object({"x": 1}, peer),
    ]
    for handle in reversed(handles):
        handle.wait(20)
    first = [handle.result() for handle in handles]
    comm.close()
    for handle, result in zip(handles, first, strict=True):
        handle.wait()
        handle.synchronize(0)
        assert handle.result(0) is result
        assert handle.is_completed()
        assert handle.exception() is None


def test_wait_again_in_reverse_and_after_close(ranks: Ranks) -> None:
    ranks.run(waits_twice, 2)


def waits_from_threads() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    receive = comm.irecv(None, peer)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(receive.result(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    here.meet("waiting")
    send = comm.isend(torch.ones(LARGE), peer)
    senders = [threading.Thread(target=send.wait, args=(20,)) for _ in range(4)]
    for thread in senders:
        thread.start()
    for thread in [*threads, *senders]:
        thread.join(20)
        assert not thread.is_alive()
    assert len(results) == 4
    assert all(result is results[0] for result in results)
    comm.close()


def test_several_threads_wait_for_one_handle(ranks: Ranks) -> None:
    ranks.run(waits_from_threads, 2)


def errors_stay() -> None:
    comm = here.connect()
    if comm.rank == 0:
        comm.isend(torch.ones(3), 1)
        comm.isend(torch.full((4,), 2.0), 1)
        comm.drain(20)
    else:
        wrong = comm.irecv(torch.empty(2), 0)
        good = [comm.irecv(torch.empty(4), 0) for _ in range(2)]
        errors = []
        for _ in range(3):
            with pytest.raises(CommError) as caught:
                wrong.wait(20)
            errors.append(caught.value)
        assert {error.kind for error in errors} == {ErrorKind.PROTOCOL}
        assert len({str(error) for error in errors}) == 1
        assert wrong.is_completed()
        assert str(wrong.exception()) == str(errors[0])
        assert [handle.result(20).tolist() for handle in good] == [[1] * 3, [2] * 4]
        comm.close()
        with pytest.raises(CommError, match="the peer sent float32 of shape"):
            wrong.result()
    comm.close()


def test_an_error_is_the_same_every_time(ranks: Ranks) -> None:
    ranks.run(errors_stay, 2)


def timeouts_change_nothing() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    receives = [comm.irecv(None, peer), comm.irecv_tensor_dict(peer)]
    send = comm.isend(torch.ones(LARGE), peer, tag=5)
    for handle in [*receives, send]:
        for limit in (0, 0.0, 1e-9, 1e-4, 0.05):
            with pytest.raises(CommTimeout) as caught:
                handle.wait(limit)
            assert caught.value.kind is ErrorKind.TIMEOUT
            assert f"rank {peer}" in str(caught.value)
            assert isinstance(caught.value, TimeoutError)
        invalid: tuple[Any, ...] = (-1, -1e-9, math.nan, -math.inf, True, "1")
        for bad in invalid:
            with pytest.raises(ValueError, match="timeout"):
                handle.wait(bad)
        assert not handle.is_completed()
        assert handle.exception() is None
    with pytest.raises(CommTimeout, match="1 sends are not complete"):
        comm.drain(0.01)
    here.meet("everything timed out")
    comm.isend(torch.ones(LARGE), peer)
    comm.isend_tensor_dict({"x": 1}, peer)
    assert comm.recv(None, peer, tag=5).sum() == LARGE
    assert receives[0].result(math.inf).sum() == LARGE
    assert receives[1].result(1e300) == {"x": 1}
    send.wait(20)
    comm.drain(20)
    comm.close()


def test_timeouts_of_any_size_change_nothing(ranks: Ranks) -> None:
    ranks.run(timeouts_change_nothing, 2)


def interrupted(call: str) -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    if comm.rank == 1:
        here.meet("interrupted")
        comm.send(torch.ones(LARGE), peer)
        comm.recv(None, peer)
        return
    receive = comm.irecv(None, peer)
    send = comm.isend(torch.ones(LARGE), peer)
    calls: dict[str, Callable[[], Any]] = {
        "wait for a receive": receive.wait,
        "wait for a send": send.wait,
        "timed wait": lambda: receive.wait(1000),
        "drain": comm.drain,
    }
    here.say("about to wait")
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    here.say("interrupted")
    here.meet("interrupted")
    assert receive.result(20).sum() == LARGE
    send.wait(20)
    comm.close()


@pytest.mark.parametrize("call", ["wait for a receive", "wait for a send", "timed wait", "drain"])
def test_ctrl_c_interrupts_a_wait_and_not_its_operation(ranks: Ranks, call: str) -> None:
    processes = ranks.spawn(interrupted, 2, call, finalize=False)
    assert processes[0].hear() == "about to wait"
    processes[0].sleeping()
    processes[0].signal(signal.SIGINT)
    assert processes[0].hear(10) == "interrupted"
    collect(processes)


def use_after_close() -> None:
    comm = here.connect()
    peer = 1 - comm.rank
    pending = comm.irecv(None, peer)
    here.meet("posted")
    comm.close(10)
    comm.close()
    tensor = torch.ones(3)
    calls: list[Callable[[], Any]] = [
        lambda: comm.isend(tensor, peer),
        lambda: comm.irecv(tensor, peer),
        lambda: comm.send_object(1, peer),
        lambda: comm.recv_object(peer),
        lambda: comm.isend_tensor_dict({"x": tensor}, peer),
        lambda: comm.irecv_tensor_dict(peer),
        lambda: comm.broadcast(tensor, 0),
        lambda: comm.broadcast_object(1, 1, async_op=True),
        lambda: comm.channel("fold").isend(tensor, peer),
        pending.wait,
        pending.result,
    ]
    for call in calls:
        with pytest.raises(CommError) as caught:
            call()
        assert caught.value.kind is ErrorKind.CLOSED
    comm.drain()
    assert comm.ledger.snapshot().operations == ()
    assert "closed" in repr(comm)


def test_every_call_after_close_says_closed(ranks: Ranks) -> None:
    ranks.run(use_after_close, 2)
