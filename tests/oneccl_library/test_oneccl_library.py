"""What oneCCL's own library does on host memory: the facts that its backends declare.

Ranks are processes here.  Nothing of commlayer is between these tests and the library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from ranks import here
from ranks.pool import RankFailure, Ranks
from torch._C._distributed_c10d import PrefixStore

from oneccl_library.library import Group

SMALL, LARGE = 4096, 1 << 20
PATIENCE = 30.0


def unconnected(name: str) -> Group:
    return Group(PrefixStore(name, here.store()), here.rank())


def group(name: str) -> Group:
    """The communicator `name` of both ranks."""
    return unconnected(name).connect()


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


def connect_crossed() -> None:
    """Each in a thread of its own; the second only once both ranks have begun their first."""
    groups = [unconnected("up"), unconnected("down")]
    for turn, made in enumerate(groups if here.rank() == 0 else reversed(groups)):
        threading.Thread(target=lambda made=made: say_when_connected(made), daemon=True).start()
        time.sleep(0.5)
        here.meet(f"connects {turn}")
    here.say("connects both")
    here.hear()


def say_when_connected(made: Group) -> None:
    try:
        made.connect()
        here.say("connected")
    except Exception as error:
        here.say(repr(error))


def returned(ranks: Ranks) -> list[str]:
    """What the calls of either rank have returned in 5 seconds."""
    said = []
    for process in ranks.spawn(connect_crossed, 2):
        assert process.hear(PATIENCE) == "connects both"
        try:
            said.append(process.hear(5.0))
        except RankFailure as failure:
            if "does not come" not in str(failure):
                raise
    ranks.end_processes()
    return said


def test_communicators_connected_in_crossed_order_wait_for_each_other(ranks: Ranks) -> None:
    """Why a connection makes its communicators at once, one by one, in one order on all ranks.

    The same order does not suffice where they are made in several threads at once.
    """
    # On a busy machine a rank's second thread may come before its first is inside the call.
    assert any(not returned(ranks) for _ in range(3))
