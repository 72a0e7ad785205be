"""A signal handler that raises, at every point of a call at which Python runs handlers.

A trace function raises in their place: where a function begins, after every call and at
every jump back, one point after another, until the call gets through.
"""

from __future__ import annotations

import dis
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import cache, partial
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from commlayer_testkit.local import WAITED, Hub, connected

import commlayer
from commlayer import CommError, CommTimeout, Communicator, forks

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="tables of handlers came with 3.11"),
]

LARGE = 3000
PACKAGE = os.path.dirname(commlayer.__file__) + os.sep


class Alarm(BaseException):
    """What the handler raises."""


@cache
def points(code: CodeType) -> frozenset[tuple[int, int]]:
    """Between which two instructions, one run after the other, Python runs handlers.

    An exception there belongs to the call before.  Where that has another handler than what
    follows it, as at the end of a ``with`` block, a trace function cannot stand in for it.
    """
    regions = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    def handler(offset: int) -> int:
        return next((r.target for r in regions if r.start <= offset < r.end), -1)

    found = set()
    instructions = list(dis.get_instructions(code))
    for before, after in pairwise(instructions):
        waits = before.opname.startswith(("CALL", "RESUME"))
        if waits and handler(before.offset) == handler(after.offset):
            found.add((before.offset, after.offset))
        if "BACKWARD" in before.opname:
            found.add((before.offset, before.argval))
    return frozenset(found)


class Interrupter:
    """Raises `Alarm` at point number `at` of what this thread does within the library."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.rang = False
        self.returned = False
        self.at: dict[FrameType, int] = {}
        """The instruction that each frame ran last."""
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._enter)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self.at.clear()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        # Python runs no handler when a function of its own returns to another.
        here, self.returned = not self.returned, event == "return"
        before = self.at.get(frame, -1)
        self.at[frame] = frame.f_lasti
        point = (before, frame.f_lasti) in points(frame.f_code)
        if event == "opcode" and here and not self.rang and point:
            self.left -= 1
            if self.left < 0:
                self.rang = True
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"  # type: ignore[attr-defined]
                sys.settrace(None)
                raise Alarm(self.where)
        return self._step


def interrupted(call: Callable[[], Any], at: int) -> Interrupter:
    """Make `call` with an interrupt at point `at`, if it has so many."""
    with Interrupter(at) as interrupter:
        try:
            call()
        except Alarm:
            pass
        except CommTimeout:
            pass
    return interrupter


def ended(call: Callable[[], Any]) -> bool:
    """Make `call`; whether an interrupt has ended its lane."""
    try:
        handle = call()
        error = handle.exception()
    except CommError as raised:
        error = raised
    return error is not None and "interrupted" in str(error)


class Pair:
    """Two ranks that are made anew once an interrupt has ended one of their lanes."""

    def __init__(self, **settings: Any) -> None:
        self.settings = {"close_timeout": 1.0, "check_lifetime": False, **settings}
        self.stack = ExitStack()
        self.ended = 0
        self.hub = Hub(2, WAITED)
        self.again()

    def again(self) -> None:
        with suppress(AssertionError):  # a work that the interrupt took away was dropped
            self.stack.close()
        self.hub = Hub(2, WAITED)
        self.a, self.b = self.stack.enter_context(connected(hub=self.hub, **self.settings))

    def check(self, where: str) -> None:
        """No lock is taken, nobody is lost, and another channel works."""
        for lock in list(forks._locks):
            assert lock.acquire(timeout=20), where  # type: ignore[attr-defined]
            lock.release()  # type: ignore[attr-defined]
        for comm in (self.a, self.b):
            for peer in comm._connection.peers.values():
                assert not peer.lost, (where, peer.error)
        self.a.channel("control").isend_object(where, 1)
        assert self.b.channel("control").irecv_object(0).result(20) == where

    def settle(self, where: str) -> None:
        """Everything is over, and counted so."""
        for comm in (self.a, self.b):
            comm.drain(20)
            snapshot = comm.ledger.snapshot()
            assert (snapshot.sends, snapshot.bytes) == (0, 0), where


@pytest.fixture(params=["safe", "direct"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(wait_mode=request.param)
    yield made
    made.stack.close()


Send = Callable[[Communicator, int, int], Any]
Receive = Callable[[Communicator, int], Any]


def value_of(tensor: torch.Tensor) -> int:
    return int(tensor[-1])


SENDS: dict[str, tuple[Send, Receive]] = {
    "small tensor": (
        lambda comm, number, tag: comm.isend(torch.full((3,), number), 1, tag),
        lambda comm, tag: value_of(comm.irecv(None, 0, tag).result(20)),
    ),
    "tensor": (
        lambda comm, number, tag: comm.isend(torch.full((LARGE,), number), 1, tag),
        lambda comm, tag: value_of(comm.irecv(None, 0, tag).result(20)),
    ),
    "object": (
        lambda comm, number, tag: comm.isend_object({"number": number}, 1, tag),
        lambda comm, tag: comm.irecv_object(0, tag).result(20)["number"],
    ),
    "dict": (
        lambda comm, number, tag: comm.isend_tensor_dict({"t": torch.full((LARGE,), number)}, 1),
        lambda comm, tag: value_of(comm.irecv_tensor_dict(0).result(20)["t"]),
    ),
    "broadcast": (
        lambda comm, number, tag: comm.broadcast(torch.full((LARGE,), number), 0, async_op=True),
        lambda comm, tag: value_of(comm.broadcast(None, 0, async_op=True).result(20)),
    ),
}


@pytest.mark.parametrize("name", SENDS)
def test_a_send_has_happened_or_not(pair: Pair, name: str) -> None:
    """Messages arrive in order, each once; only an interrupt inside the transport ends a lane."""
    send, receive = SENDS[name]
    at = number = 0
    while True:
        tag = 1 + at % 5000
        first = number
        number += 2
        interrupter = interrupted(partial(send, pair.a, first, tag), at)
        if not interrupter.rang:
            break
        where = interrupter.where
        pair.check(where)
        at += 1
        if ended(partial(send, pair.a, first + 1, tag)):
            pair.ended += 1
            pair.again()
            continue
        got = receive(pair.b, tag)
        if got != first + 1:
            assert got == first, where
            assert receive(pair.b, tag) == first + 1, where
        pair.settle(where)
    print(f"{name}: {at} points, of which {pair.ended} inside the transport")
    assert at > 50
    assert pair.ended < at / 10


RECEIVES: dict[str, tuple[Send, Callable[[Communicator, int], Any], Callable[[Any], int]]] = {
    "tensor": (
        SENDS["tensor"][0], lambda comm, tag: comm.irecv(None, 0, tag), value_of,
    ),
    "object": (
        SENDS["object"][0], lambda comm, tag: comm.irecv_object(0, tag), lambda v: v["number"],
    ),
    "broadcast": (
        SENDS["broadcast"][0],
        lambda comm, tag: comm.broadcast(None, 0, async_op=True), value_of,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECEIVES)
def test_a_receive_that_was_interrupted_takes_no_message(pair: Pair, name: str) -> None:
    send, receive, value = RECEIVES[name]
    at = 0
    while True:
        tag = 1 + at % 5000
        interrupter = interrupted(partial(receive, pair.b, tag), at)
        if not interrupter.rang:
            break
        pair.check(interrupter.where)
        send(pair.a, at, tag)
        handle = receive(pair.b, tag)
        where = interrupter.where
        got = value(handle.result(20))
        assert got == at, where
        pair.settle(interrupter.where)
        at += 1
    print(f"receive of {name}: {at} points")
    assert at > 10


@pytest.mark.parametrize("limit", [None, 0.001], ids=["without limit", "with a limit"])
def test_a_wait_that_was_interrupted_changes_nothing(pair: Pair, limit: float | None) -> None:
    if limit is None and pair.settings["wait_mode"] == "direct":
        pytest.skip("an interrupt inside the native wait ends the lane")
    at = 0
    while True:
        tag = 1 + at % 5000
        handle = pair.b.irecv(None, 0, tag)
        sender = threading.Timer(0.01, SENDS["tensor"][0], (pair.a, at, tag))
        if limit is None:
            sender.start()
        interrupter = interrupted(partial(handle.wait, limit), at)
        if limit is not None:
            sender.start()
        assert value_of(handle.result(20)) == at, interrupter.where
        sender.join()
        pair.check(interrupter.where)
        pair.settle(interrupter.where)
        if not interrupter.rang:
            break
        at += 1
    print(f"wait: {at} points")
    assert at > 5
