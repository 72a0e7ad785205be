"""What oneCCL's own library does on host memory: the facts that its backends declare.

Ranks are processes here.  Nothing of commlayer is between these tests and the library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from ranks import here
from ranks.pool import RankFailure, Ranks
from torch._C._distributed_c10d import PrefixStore

from oneccl_library.library import Group

SMALL, LARGE = 4096, 1 << 20
PATIENCE = 30.0


def group(name: str) -> Group:
    """The communicator `name` of both ranks, over a store client that nothing else waits for."""
    return Group(PrefixStore(name, here.store().clone()), here.rank())


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


def tell_completion() -> None:
    messages = group("one")
    if here.rank() == 0:
        work = messages.send([torch.full((LARGE,), 7, dtype=torch.uint8)], 1, 0)
        assert not any(work.is_completed() for _ in range(100))
        here.meet("sent")
        until(work.is_completed)
    else:
        here.meet("sent")
        received = torch.zeros(LARGE, dtype=torch.uint8)
        work = messages.recv([received], 0, 0)
        until(work.is_completed)
        assert received.eq(7).all()
    assert work.wait()
    assert work.wait()
    assert work.is_completed()


def test_polling_is_exact_and_waiting_may_be_repeated(ranks: Ranks) -> None:
    ranks.run(tell_completion, 2)


def send_eagerly() -> None:
    messages = group("one")
    if here.rank() == 0:
        work = messages.send([torch.full((SMALL,), 3, dtype=torch.uint8)], 1, 0)
        until(work.is_completed)
        here.meet("sent")
    else:
        here.meet("sent")
        received = torch.zeros(SMALL, dtype=torch.uint8)
        assert messages.recv([received], 0, 0).wait()
        assert received.eq(3).all()


def test_a_small_send_is_complete_before_it_is_received(ranks: Ranks) -> None:
    ranks.run(send_eagerly, 2)


def send_in_opposite_directions() -> None:
    up, down = group("up"), group("down")
    rank, peer = here.rank(), 1 - here.rank()
    mine, theirs = (up, down) if rank == 0 else (down, up)
    for turn in range(5):
        sent = mine.send([torch.full((LARGE,), 10 * turn + rank, dtype=torch.uint8)], peer, 0)
        here.meet(f"both have sent {turn}")
        received = torch.zeros(LARGE, dtype=torch.uint8)
        theirs.recv([received], peer, 0).wait()
        assert received.eq(10 * turn + peer).all()
        sent.wait()


def test_opposite_sends_do_not_wait_for_each_other(ranks: Ranks) -> None:
    ranks.run(send_in_opposite_directions, 2)


def wait_in_a_thread() -> None:
    """The lock of the process that the ``ccl`` bindings wait under is not oneCCL's."""
    idle, busy = group("idle"), group("busy")
    if here.rank() == 0:
        unsent = torch.zeros(LARGE, dtype=torch.uint8)
        waited = threading.Thread(target=idle.recv([unsent], 1, 0).wait)
        waited.start()
        for value in range(3):
            busy.send([torch.full((LARGE,), value, dtype=torch.uint8)], 1, 0).wait()
        here.meet("the others are through")
        waited.join(PATIENCE)
        assert not waited.is_alive()
        assert unsent.eq(9).all()
    else:
        received = torch.zeros(LARGE, dtype=torch.uint8)
        for value in range(3):
            busy.recv([received], 0, 0).wait()
            assert received.eq(value).all()
        here.meet("the others are through")
        idle.send([torch.full((LARGE,), 9, dtype=torch.uint8)], 0, 0).wait()


def test_a_blocked_wait_holds_up_its_own_communicator_only(ranks: Ranks) -> None:
    ranks.run(wait_in_a_thread, 2)


def make_in_order() -> None:
    for name in ("up", "down"):
        group(name)


def test_communicators_made_one_by_one_in_one_order_are_made(ranks: Ranks) -> None:
    ranks.run(make_in_order, 2)


def make_crossed() -> None:
    """Each in a thread of its own, so that no rank's first waits before its second has begun."""
    for name in ("up", "down") if here.rank() == 0 else ("down", "up"):
        threading.Thread(target=lambda name=name: say_when_made(name), daemon=True).start()
        time.sleep(1.0)
    here.hear()


def say_when_made(name: str) -> None:
    try:
        group(name)
        here.say(name)
    except Exception as error:
        here.say(repr(error))


def test_communicators_made_in_crossed_order_never_are(ranks: Ranks) -> None:
    """Why a connection makes its communicators at once, one by one, in one order on all ranks.

    The same order does not suffice where they are made in several threads at once.
    """
    for process in ranks.spawn(make_crossed, 2):
        with pytest.raises(RankFailure, match="does not come"):
            process.hear(5.0)
