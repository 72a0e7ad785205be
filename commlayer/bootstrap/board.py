"""The store as the ranks of one `connect` use it: asked with patience, and read to the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from commlayer.backend import World
from commlayer.bootstrap.cards import Card, Failure, decode_card, encode
from commlayer.bootstrap.crossing import Crossing
from commlayer.bootstrap.launch import Generation, refusal
from commlayer.bootstrap.patience import Helper, Late, check_staying
from commlayer.bootstrap.stores import describe
from commlayer.errors import CommError, CommTimeout, ErrorKind

T = TypeVar("T")

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.05
_BRIEF_SECONDS = 0.5
"""What an interrupted rank takes at most to say so: Ctrl-C is answered within a second."""
_PATIENT_SECONDS = 3.0
"""What a rank that fails takes at most to say so, which a busy machine may need."""
_LEAST_SECONDS = 1.0
"""A store that answers is asked to the end even where connect_timeout is shorter than that."""


class Board:
    """Where this rank leaves its card and reads those of others.

    `absent` are the ranks that rank 0 is waiting for, as far as this rank knows, and `left`
    the card of a rank 0 that has given up.  `told` is what another rank has given up for.
    """

    def __init__(self, world: World, generation: Generation) -> None:
        self.world = world
        self.generation = generation
        self.card = Card.of(world.size, generation)
        self.absent: list[int] = []
        self.left: Card | None = None
        self.told: Failure | None = None
        self.heard = b""
        """The nonce of the last rank 0 that this rank has answered."""
        self.store: Any = world.store
        self.crossing = Crossing(world, self.card.pid)
        self._helper = Helper()

    def ask(self, question: Callable[[Any], T]) -> T:
        """Ask the store something; raises `CommError` where it does not answer."""
        check_staying()
        limit = max(_LEAST_SECONDS, self.world.remaining())
        try:
            return self._helper.call(lambda: question(self.store), limit, check_staying)
        except Late:
            raise CommTimeout(
                "connect",
                f"{describe(self.store)} does not answer within {self.world.connect_timeout:g} s",
                "See whether the process that serves it is stopped, and that the network is up",
            ) from None
        except CommError:
            raise
        except (RuntimeError, OSError) as error:
            raise self.lost(error) from error

    def set(self, key: str, value: bytes) -> None:
        """Set `key` for all ranks; raises as `ask` does."""
        self.ask(lambda store: store.set(key, value))

    def lost(self, error: Exception) -> CommError:
        """The error of a store that has ended; what rank 0 gave up for, where it has said so."""
        left, note = self.left, ""
        if left is not None and left.gone is not None:
            if left.nonce == self.heard:
                return self.tell(left.gone)
            note = f"; {left.gone.said()}"
        elif self.absent:
            note = f"; rank {listed(self.absent)} of {self.world.size} had not come"
        return CommError(
            ErrorKind.PEER_LOST,
            "connect",
            f"{describe(self.store)} does not answer any more ({_first_line(error)}): rank 0, or "
            f"the launcher that serves it, has ended{note}",
            "See why it has ended, and connect again once it is back",
        )

    def publish(self, answers: bytes = b"") -> None:
        """Leave this rank's card, which `answers` rank 0's."""
        self.card = msgspec.structs.replace(self.card, answers=answers)
        self.heard = answers or self.heard
        self.set(f"card/{self.world.rank}", encode(self.card))

    def check_own(self, own: Card | None) -> None:
        """Refuse to share a rank: only another live process overwrites this one's card."""
        if own is None or own.nonce == self.card.nonce:
            return
        rank = self.world.rank
        raise refusal(
            f"two processes connect as rank {rank}: {self.card.who}, and {own.who}",
            "Give every process another RANK, and every job another address (MASTER_PORT) or name",
        )

    def late(self, absent: list[int], note: str = "") -> CommTimeout:
        """The error of a limit within which the `absent` ranks did not come."""
        return CommTimeout(
            "connect",
            f"rank {listed(absent)} of {self.world.size} did not connect within "
            f"{self.world.connect_timeout:g} s" + (f" ({note})" if note else ""),
            "Start all ranks, each with the same `name`; see connect_timeout",
        )

    def tell(self, failure: Failure) -> CommError:
        """The error that another rank has left; it stays the cause when this one gives up, too."""
        self.told = failure
        return failure.error()

    def rest(self, pause: float) -> float:
        """Sleep, in the calling thread, which may be interrupted; the pause to make next."""
        if self.crossing.due():
            self.ask(self.crossing.look)
        time.sleep(pause)
        return min(LONGEST_PAUSE, pause * 1.5)

    def brief(self, question: Callable[[Any], T], *, hurried: bool = True) -> T:
        """Ask the store something that matters to others only; raises `Late` after a moment."""
        limit = _BRIEF_SECONDS if hurried else _PATIENT_SECONDS
        return self._helper.call(lambda: question(self.store), limit)

    def close(self) -> None:
        self._helper.close()


def key(what: str, nonce: bytes) -> str:
    return f"{what}/{nonce.hex()}"


def read(store: Any, key: str) -> bytes:
    """The value of `key`; empty where it is not set, because a plain ``get`` would wait."""
    return bytes(store.get(key)) if store.check([key]) else b""


def card_of(store: Any, rank: int) -> Card | None:
    return decode_card(read(store, f"card/{rank}"))


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
