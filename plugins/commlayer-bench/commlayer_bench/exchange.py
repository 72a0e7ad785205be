"""A message to its consumer and the byte that comes back."""

from __future__ import annotations

from typing import Any, NamedTuple

from commlayer_bench.contender import Way
from commlayer_bench.workload import Here


class Times(NamedTuple):
    """Seconds from the first post until all are posted, and until the reply is here."""

    posted: float
    replied: float


def send(
    way: Way, message: Any, here: Here, *, to: int = 1, count: int = 1, driven: bool = False
) -> Times:
    """On rank 0: post `message` `count` times in a row, await the reply of rank 1, then wait.

    `driven` waits for the sends first, without which they would not go on.
    """
    begin = here.now()
    posted = [way.send(message, to) for _ in range(count)]
    middle = here.now()
    if driven:
        for finish in posted:
            finish()
    here.await_signal(1)
    end = here.now()
    if not driven:
        for finish in posted:
            finish()
    return Times(middle - begin, end - begin)


def answer(way: Way, like: Any, here: Here, *, count: int = 1) -> None:
    """On rank 1: receive `count` messages, one after the other, and reply."""
    for _ in range(count):
        way.receive(like, 0)()
    here.signal(0)
