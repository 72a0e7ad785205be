"""Rank 0's part in a rendezvous: it waits for cards that answer its own, and writes the roster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from commlayer.bootstrap.board import FIRST_PAUSE, Board, card_of, key, read
from commlayer.bootstrap.cards import Card, Failure, decode_card, decode_failure, encode
from commlayer.bootstrap.launch import refusal
from commlayer.errors import CommError, CommTimeout

_DOUBT_SECONDS = 1.0
"""How long rank 0 waits, where a card was replaced by another, for the first owner to object."""


class Leader:
    """Gathers the cards of all ranks."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._others = range(1, board.world.size)
        self._seen: dict[int, Card] = {}
        self._doubtful_until = 0.0

    def gather(self) -> Sequence[Card]:
        """Wait for all ranks; the roster, which they can read by then."""
        board = self._board
        board.publish()
        pause = FIRST_PAUSE
        while True:
            complete = not self._missing()
            # Cards that were seen are read again before they count: one may be withdrawn.
            wanted = list(self._others) if complete else self._missing()
            found = board.ask(partial(self.look, wanted))
            board.check_own(found.own)
            if found.misfit is not None:
                raise self._misfit(found.misfit)
            changed = self._take(found.cards)
            if found.failure is not None:
                raise board.tell(found.failure)
            if complete and not changed and time.monotonic() >= self._doubtful_until:
                roster = [board.card, *(self._seen[rank] for rank in self._others)]
                board.set(key("roster", board.card.nonce), encode(roster))
                return roster
            if changed:
                self._say_who_is_here()
                pause = FIRST_PAUSE
                if not board.absent:
                    continue
            if time.monotonic() >= board.world.deadline:
                raise self._absence(found.cards)
            pause = board.rest(pause)

    def look(self, wanted: Sequence[int], store: Any) -> Found:
        """What stands in the store for rank 0."""
        nonce = self._board.card.nonce
        return Found(
            own=card_of(store, 0),
            cards={rank: card_of(store, rank) for rank in wanted},
            misfit=decode_card(read(store, key("misfit", nonce))),
            failure=decode_failure(read(store, key("failure", nonce))),
        )

    def _missing(self) -> list[int]:
        return [rank for rank in self._others if rank not in self._seen]

    def _take(self, cards: dict[int, Card | None]) -> bool:
        """Note who answers; whether that has changed anything."""
        before = dict(self._seen)
        for rank, card in cards.items():
            answers = card is not None and card.answers == self._board.card.nonce
            if card is None or not answers or card.gone or not self._fits(rank, card):
                self._seen.pop(rank, None)
                continue
            known = self._seen.get(rank)
            if known is not None and known.nonce != card.nonce:
                self._doubtful_until = time.monotonic() + _DOUBT_SECONDS
            self._seen[rank] = card
        return self._seen != before

    def _say_who_is_here(self) -> None:
        board = self._board
        board.absent = self._missing()
        nonces = [self._seen[r].nonce if r in self._seen else b"" for r in self._others]
        board.set(key("seen", board.card.nonce), encode(nonces))

    def _fits(self, rank: int, card: Card) -> bool:
        """Whether the live rank `rank` belongs to this attempt; tells it, or raises, if not."""
        board = self._board
        if card.size != board.world.size:
            raise self._misfit(card, rank)
        theirs = card.generation
        if not board.generation.differs(theirs):
            return True
        text = (
            f"rank {rank} ({card.who}) connects as generation {theirs.number}, and rank 0 "
            f"({board.card.who}) as generation {board.generation.number}"
        )
        if theirs.number > board.generation.number:
            raise refusal(text, "This group is outdated: connect with the generation of the others")
        self._refuse(card, refusal(text, "Connect with the generation of the others"))
        return False

    def _misfit(self, card: Card, rank: int | None = None) -> CommError:
        board = self._board
        who = "a rank" if rank is None else f"rank {rank}"
        error = refusal(
            f"{who} ({card.who}) connects in a world of {card.size} ranks, and rank 0 "
            f"({board.card.who}) in one of {board.world.size} (WORLD_SIZE {card.size} and "
            f"{board.world.size})",
            "Give all ranks the same size; see whether another job uses the same address",
        )
        self._refuse(card, error)
        return error

    def _refuse(self, card: Card, error: CommError) -> None:
        said = encode(Failure.of(0, self._board.card, error))
        self._board.set(key("refused", card.nonce), said)

    def _absence(self, cards: dict[int, Card | None]) -> CommTimeout:
        board = self._board
        board.absent = self._missing()
        notes = []
        for rank in board.absent:
            card = cards.get(rank)
            if card is None or card.answers not in (b"", board.card.nonce):
                continue
            if card.gone is not None:
                notes.append(card.gone.said())
            elif board.generation.differs(card.generation):
                notes.append(f"rank {rank} ({card.who}) is of generation {card.generation.number}")
        return board.late(board.absent, "; ".join(notes))


class Found(NamedTuple):
    """What rank 0 reads."""

    own: Card | None
    cards: dict[int, Card | None]
    misfit: Card | None
    failure: Failure | None
