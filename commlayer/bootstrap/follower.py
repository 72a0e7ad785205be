"""The part of every rank but 0 in a rendezvous: it answers rank 0's card, and finds the roster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from commlayer.bootstrap.board import FIRST_PAUSE, Board, card_of, key, read
from commlayer.bootstrap.cards import (
    Card,
    Failure,
    decode_failure,
    decode_roster,
    decode_seen,
    encode,
)
from commlayer.errors import CommError, ErrorKind


class Follower:
    """Waits until rank 0 has taken this rank in."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._taken: Card | None = None
        """The card by which another process has met the others as this rank."""

    def follow(self) -> Sequence[Card]:
        """Wait for the roster of a rank 0 that is alive."""
        board, rank = self._board, self._board.world.rank
        board.publish()
        pause = FIRST_PAUSE
        while True:
            signs = board.ask(self._look)
            if signs.refusal is not None:
                raise board.tell(signs.refusal)
            if signs.roster is not None and len(signs.roster) > rank:
                if signs.roster[rank].nonce == board.card.nonce:
                    return signs.roster
                self._taken = signs.roster[rank]
            board.check_own(signs.own)
            if board.card.nonce in signs.seen:
                board.absent = [r for r, nonce in enumerate(signs.seen, 1) if not nonce]
            if signs.leader is not None:
                self._heed(signs.leader)
            if time.monotonic() >= board.world.deadline:
                raise self._absence(signs.leader)
            pause = board.rest(pause)

    def _look(self, store: Any) -> _Signs:
        """What stands in the store.  Rank 0's card is read first: whatever it wrote before it
        changed that card, such as the roster, is then there."""
        board = self._board
        leader, answered = card_of(store, 0), board.card.answers
        return _Signs(
            leader=leader,
            own=card_of(store, board.world.rank),
            roster=decode_roster(read(store, key("roster", answered))) if answered else None,
            seen=decode_seen(read(store, key("seen", answered))) if answered else (),
            refusal=decode_failure(read(store, key("refused", board.card.nonce))),
        )

    def _heed(self, leader: Card) -> None:
        """Answer rank 0's card, or hear why it has given up."""
        board = self._board
        if leader.gone is not None:
            board.left = leader
            if leader.nonce != board.card.answers:
                return  # it may be of an earlier attempt
            outdated = leader.generation.number < board.generation.number
            if leader.gone.kind is not ErrorKind.TIMEOUT and not outdated:
                raise board.tell(leader.gone)
            board.publish()  # another rank 0 may come
        elif leader.nonce != board.card.answers:
            board.absent = []
            board.publish(answers=leader.nonce)
            if leader.size != board.world.size:
                # Rank 0 does not look at cards of ranks beyond its own world.
                board.set(key("misfit", leader.nonce), encode(board.card))

    def _absence(self, leader: Card | None) -> CommError:
        """Who is absent, as far as this rank can know."""
        board = self._board
        if board.absent:
            return board.late(board.absent)
        note = ""
        mine, taken, left = board.card, self._taken, board.left
        if taken is not None and (taken.pid, taken.host) != (mine.pid, mine.host):
            note = (
                f"another process ({taken.who}) has connected as rank {board.world.rank}: it has "
                "the same RANK, is of another job at this address, or went before this one"
            )
        elif left is not None and left.gone is not None:
            note = left.gone.said()
        elif leader is not None and leader.size != mine.size:
            note = f"rank 0 ({leader.who}) is of a world of {leader.size} ranks (WORLD_SIZE)"
        elif leader is not None and board.generation.differs(leader.generation):
            note = f"rank 0 ({leader.who}) was of generation {leader.generation.number}"
        elif leader is not None and taken is None:
            note = f"rank 0 ({leader.who}) does not answer"
        return board.late([0], note)


class _Signs(NamedTuple):
    """What another rank than 0 reads."""

    leader: Card | None
    own: Card | None
    roster: Sequence[Card] | None
    seen: Sequence[bytes]
    refusal: Failure | None
