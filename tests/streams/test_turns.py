"""Operations of a process that go one at a time, as under the lock of the ``ccl`` bindings."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from commlayer_oneccl.turns import Process, TurnGroup
from torch._C._distributed_c10d import PrefixStore

from commlayer.errors import CommError, ErrorKind

PATIENCE = 60.0


class Lane:
    """Where the halves of each operation meet."""

    def __init__(self) -> None:
        self._halves: dict[tuple[int, bool], threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def half(self, operation: int, sends: bool) -> threading.Event:
        with self._lock:
            return self._halves[operation, sends]


class LockedWork:
    """Complete when the peer's half is posted; until then the process's lock is held."""

    def __init__(self, peers_half: threading.Event, lock: threading.Lock) -> None:
        self.peers_half = peers_half
        self._lock = lock

    def wait(self) -> None:
        assert self.peers_half.wait(PATIENCE)
        self._lock.release()


class LockedGroup:
    """What the bindings do: the lock of the process is held from a post to its completion."""

    def __init__(self, lane: Lane, lock: threading.Lock) -> None:
        self._lane, self._lock = lane, lock
        self._posted = 0

    def send(self, tensors: list[Any], dst: int, tag: int) -> LockedWork:
        return self._post(sends=True)

    def recv(self, tensors: list[Any], src: int, tag: int) -> LockedWork:
        return self._post(sends=False)

    def _post(self, sends: bool) -> LockedWork:
        self._lock.acquire()
        self._lane.half(self._posted, sends).set()
        self._posted += 1
        return LockedWork(self._lane.half(self._posted - 1, not sends), self._lock)


class BrokenGroup:
    """Sends cannot be posted; receives fail."""

    def send(self, tensors: list[Any], dst: int, tag: int) -> Any:
        raise RuntimeError("no device")

    def recv(self, tensors: list[Any], src: int, tag: int) -> Any:
        class Failed:
            def wait(self) -> None:
                raise RuntimeError("it failed")

        return Failed()


class Job:
    """Processes with a lock each; threads of this one post for them."""

    def __init__(self, size: int) -> None:
        self.store = dist.HashStore()
        self.locks = [threading.Lock() for _ in range(size)]
        self.processes = [Process() for _ in range(size)]

    def group(self, made: Any, lane: str, process: int, rank: int) -> TurnGroup:
        return TurnGroup(made, PrefixStore(lane, self.store), rank, self.processes[process])

    def flow(self, source: int, target: int, times: int, name: str = "") -> list[threading.Thread]:
        """Threads of a lane: one sends `times` messages, one receives them.

        The source has rank 0 on each lane, so that ranks are no order of the processes.
        """
        wires, lane = Lane(), f"{source} to {target} {name}"
        out = self.group(LockedGroup(wires, self.locks[source]), lane, source, 0)
        into = self.group(LockedGroup(wires, self.locks[target]), lane, target, 1)
        return [
            started(lambda: repeat(out.send, times)),
            started(lambda: repeat(into.recv, times)),
        ]

    def both_ways(self, one: int, other: int, times: int) -> list[threading.Thread]:
        return self.flow(one, other, times) + self.flow(other, one, times)


def repeat(post: Callable[..., Any], times: int) -> None:
    for _ in range(times):
        post([], 0, 0).wait()


def started(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "it waits for ever"


def test_opposite_sends_without_turns_wait_for_each_other() -> None:
    """The receive of either process cannot be posted behind its send."""
    job = Job(2)
    works = [LockedGroup(Lane(), lock).send([], 0, 0) for lock in job.locks]
    assert all(lock.locked() for lock in job.locks)
    assert not any(work.peers_half.is_set() for work in works)


def test_opposite_sends_take_turns() -> None:
    job = Job(2)
    join(job.both_ways(0, 1, 20) + job.flow(0, 1, 20, "of a tag"))


def test_a_ring_takes_turns() -> None:
    job = Job(3)
    join([thread for rank in range(3) for thread in job.both_ways(rank, (rank + 1) % 3, 10)])


@pytest.mark.parametrize("ends", ["shutdown", "abort"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_operation_that_its_peer_does_not_come_to_holds_up_no_other(
    rank: int, ends: str
) -> None:
    job = Job(2)
    lonely = [job.group(LockedGroup(Lane(), job.locks[r]), "lonely", r, r) for r in range(2)]
    raised: list[CommError] = []

    def alone() -> None:
        with pytest.raises(CommError, match="the peer has not come") as caught:
            lonely[rank].send([], 0, 0)
        raised.append(caught.value)

    waiting = started(alone)
    join(job.both_ways(0, 1, 10))
    assert waiting.is_alive()
    getattr(lonely[rank], ends)()
    join([waiting])
    assert raised[0].kind is ErrorKind.CLOSED


def test_a_post_or_a_wait_that_raises_gives_the_turn_back() -> None:
    job = Job(2)
    ends = [job.group(BrokenGroup(), "broken", rank, rank) for rank in range(2)]

    def post() -> None:
        with pytest.raises(RuntimeError, match="no device"):
            ends[0].send([], 1, 0)

    def wait() -> None:
        with pytest.raises(RuntimeError, match="it failed"):
            ends[1].recv([], 0, 0).wait()

    join([started(post), started(wait)])
    join(job.both_ways(0, 1, 3))


def test_nothing_stays_in_the_store() -> None:
    job = Job(2)
    join(job.both_ways(0, 1, 10))
    assert job.store.num_keys() == 0
