"""A forked child: whatever the parent's threads did at that moment, every call answers at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from commlayer_testkit.local import SERIALIZED, WAITED, connected

from commlayer import CommError, Communicator, ErrorKind, forks
from commlayer.handle import Handle
from commlayer.semantics import Semantics

LARGE = 3000
SECONDS = 20
"""After which the child is ended by its alarm."""

BOTH = pytest.mark.parametrize("semantics", [WAITED, SERIALIZED], ids=["waiter", "polling"])


def in_child(body: Callable[[], None]) -> int:
    """The exit code of a forked child that runs `body`: 0 where it returns."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        try:
            body()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def every_lock_is_taken(holding: threading.Event, over: threading.Event) -> None:
    with ExitStack() as stack:
        for lock in list(forks._locks):
            stack.enter_context(lock)  # type: ignore[arg-type]
        holding.set()
        over.wait()


def with_locks_of_another_thread(body: Callable[[], None]) -> int:
    """`in_child`, while another thread of the parent is inside everything that has a lock."""
    holding, over = threading.Event(), threading.Event()
    holder = threading.Thread(target=every_lock_is_taken, args=(holding, over))
    holder.start()
    assert holding.wait(SECONDS)
    try:
        return in_child(body)
    finally:
        over.set()
        holder.join()


def says_forked(call: Callable[[], Any]) -> None:
    with pytest.raises(CommError, match="forked") as caught:
        call()
    assert caught.value.kind is ErrorKind.CLOSED


def uses_handle(handle: Handle) -> None:
    says_forked(handle.wait)
    says_forked(lambda: handle.wait(1))
    says_forked(lambda: handle.wait(0))
    says_forked(handle.synchronize)
    says_forked(handle.result)
    assert handle.is_completed()
    error = handle.exception()
    assert error is not None
    assert error.kind is ErrorKind.CLOSED
    assert "failed" in repr(handle)


def uses_communicator(comm: Communicator, peer: int) -> None:
    for call in (
        lambda: comm.isend(torch.ones(3), peer),
        lambda: comm.irecv(None, peer),
        lambda: comm.recv_object(peer),
        lambda: comm.send_tensor_dict({"a": torch.ones(LARGE)}, peer),
        lambda: comm.broadcast(torch.ones(3), 0),
        lambda: comm.broadcast_object(None, peer),
        lambda: comm.channel("control").isend_object(1, peer),
        lambda: comm.track(torch.futures.Future()),
        lambda: comm.dump("/nowhere"),
        comm.drain,
        comm.report,
    ):
        says_forked(call)
    assert comm.ledger.snapshot().operations == ()
    assert comm.last_report is None
    assert "closed" in repr(comm)
    comm.close()


@BOTH
def test_every_call_on_what_was_inherited_answers(semantics: Semantics) -> None:
    with connected(2, semantics) as (a, b):
        receive, send = a.irecv(None, 1), a.isend(torch.ones(LARGE), 1)
        broadcast = a.broadcast(torch.ones(LARGE), 0, async_op=True)
        over = b.isend(torch.ones(3), 0, tag=1)
        assert a.recv(None, 1, tag=1).numel() == 3
        over.wait(SECONDS)

        def uses_all() -> None:
            for handle in (receive, send, broadcast):
                uses_handle(handle)
            over.wait()
            uses_communicator(a, 1)
            uses_communicator(b, 0)

        assert with_locks_of_another_thread(uses_all) == 0
        assert in_child(uses_all) == 0
        b.isend(torch.full((LARGE,), 2.0), 0)
        assert receive.result(SECONDS).sum() == 2 * LARGE
        assert b.recv(None, 0).numel() == LARGE
        assert b.broadcast(None, 0).numel() == LARGE
        send.wait(SECONDS)


def test_a_child_connects_anew_whatever_its_parent_does() -> None:
    def connects() -> None:
        with connected() as (a, b):
            a.isend(torch.ones(LARGE), 1)
            assert b.recv(None, 0).sum() == LARGE

    with connected() as (a, _):
        a.irecv(None, 1)
        assert with_locks_of_another_thread(connects) == 0
