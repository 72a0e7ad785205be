"""How the ranks of one `connect` find each other in a store, and nobody else.

A store may outlive the processes that used it: ``torchrun`` keeps its own over restarts, and
survivors of a lost rank connect again under the same name.  So nothing that stands in it is
believed until it answers something that was drawn in this call:

1. Rank 0 leaves a card with a fresh nonce, and waits for cards that answer it.
2. Every other rank leaves a card with a nonce of its own, answers the nonce that rank 0's card
   shows, and answers anew when that changes.
3. Once all have answered, rank 0 writes the roster: all cards, under its nonce.  A rank that
   finds its own nonce in the roster takes part.  All keys that follow stand under rank 0's nonce.

A rank that gives up says so on its card, or after step 3 under rank 0's nonce, so that the
others hear the cause instead of running into their limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TypeVar

import msgspec

from commlayer.backend import World
from commlayer.bootstrap.board import LONGEST_PAUSE, Board, card_of, key, read
from commlayer.bootstrap.cards import Card, Failure, decode_failure, encode
from commlayer.bootstrap.follower import Follower
from commlayer.bootstrap.launch import Generation
from commlayer.bootstrap.leader import Leader
from commlayer.bootstrap.patience import Helper, Late, check_staying
from commlayer.bootstrap.stores import prefixed
from commlayer.errors import CommTimeout, ErrorKind

T = TypeVar("T")

_LINGER_SECONDS = 1.0
"""How long a rank 0 that gives up lets the others hear it: the store may end with its process."""
_SLACK_SECONDS = 0.5
"""What keeps the limit by itself says more about it, so it is given the time to."""


class Rendezvous:
    """One rank's part in one `connect`; a ``with`` block that fails tells the other ranks.

    `world` is what the ranks connect in: once they have met, its store is new, and its
    `World.call` hears of the others.
    """

    def __init__(self, world: World, generation: Generation) -> None:
        deadline = min(world.deadline, time.monotonic() + world.connect_timeout)
        self.world = replace(world, deadline=deadline, _caller=self._call)
        self._board = Board(self.world, generation)
        self._round = b""
        """The nonce of rank 0 under which all have met; empty before."""

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._leave(error)
        self._board.close()

    def meet(self, hello: bytes) -> Sequence[bytes]:
        """Wait for all ranks, and return what they say, by rank.

        Raises `CommTimeout` naming the ranks that are absent, and `CommError`: CONFIG for
        ranks that cannot belong together, PEER_LOST when the store ends, or what another
        rank has given up for.
        """
        board = self._board
        board.card = msgspec.structs.replace(board.card, hello=hello)
        roster: Sequence[Card] = [board.card]
        if self.world.size > 1:
            board.crossing.enter()
            try:
                roster = Follower(board).follow() if self.world.rank else Leader(board).gather()
            finally:
                board.crossing.leave()
        self._round = roster[0].nonce
        of = f"round/{self._round.hex()}"
        store = prefixed(board.store, of)
        self.world = replace(self.world, store=store, name=f"{self.world.name}/{of}")
        return [card.hello for card in roster]

    def watch(self) -> None:
        """Raise what another rank has given up for, after all had met, and when to give up here."""
        check_staying()
        if not self._round:
            return
        try:
            said = self._board.brief(partial(_failure, self._round))
        except (Late, RuntimeError, OSError):
            return  # whoever held the store may have connected and gone
        failure = decode_failure(said)
        if failure is not None and failure.rank != self.world.rank:
            raise self._board.tell(failure)

    def _call(self, function: Callable[[], T]) -> T:
        """See `World.call`.  On a thread apart from the store's, which `watch` needs meanwhile."""
        helper = Helper()
        try:
            return helper.call(function, self.world.remaining() + _SLACK_SECONDS, self.watch)
        except Late:
            raise CommTimeout(
                "connect",
                f"the transport did not connect within {self.world.connect_timeout:g} s",
                "See that every rank runs and that the hosts reach each other",
            ) from None
        finally:
            helper.close()

    def _leave(self, error: BaseException) -> None:
        """Say why this rank gives up.  Never raises, and takes no longer than a moment."""
        board = self._board
        hurried = not isinstance(error, Exception)
        failure = board.told or Failure.of(self.world.rank, board.card, error)
        try:
            if self._round:
                self._object(self._round, failure, hurried)
                return
            gone = encode(msgspec.structs.replace(board.card, gone=failure))
            board.brief(lambda store: store.set(f"card/{self.world.rank}", gone), hurried=hurried)
            if self.world.rank == 0:
                if not hurried:
                    self._linger()
            elif board.told is None and failure.kind is not ErrorKind.TIMEOUT:
                leader = board.brief(lambda store: card_of(store, 0), hurried=hurried)
                if leader is not None:
                    self._object(leader.nonce, failure, hurried)
        except (Late, RuntimeError, OSError):
            pass  # the others will see that this rank is absent

    def _object(self, nonce: bytes, failure: Failure, hurried: bool) -> None:
        """Tell all who have met, or meet, under `nonce`.  The first finding is the cause."""
        self._board.brief(
            lambda store: (
                _failure(nonce, store) or store.set(key("failure", nonce), encode(failure))
            ),
            hurried=hurried,
        )

    def _linger(self) -> None:
        leader, board = Leader(self._board), self._board
        deadline = time.monotonic() + _LINGER_SECONDS
        ranks = [rank for rank in range(1, self.world.size) if rank not in board.absent]
        time.sleep(2 * LONGEST_PAUSE)  # by then every rank that waits has looked
        while ranks and time.monotonic() < deadline:
            cards = board.brief(partial(leader.look, ranks)).cards
            ranks = [
                rank
                for rank, card in cards.items()
                if card is not None and card.answers == board.card.nonce and card.gone is None
            ]
            time.sleep(LONGEST_PAUSE)


def _failure(nonce: bytes, store: object) -> bytes:
    return read(store, key("failure", nonce))
