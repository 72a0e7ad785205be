"""What the ranks of one `connect` leave for each other in the store."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from commlayer.bootstrap.launch import Generation, refusal
from commlayer.errors import CommError, ErrorKind

_NONCE_BYTES = 16


class Failure(msgspec.Struct, frozen=True):
    """Why a rank gives up, as the others are told."""

    rank: int
    who: str
    kind: ErrorKind
    cause: str
    cure: str

    @classmethod
    def of(cls, rank: int, card: Card, error: BaseException) -> Failure:
        if isinstance(error, CommError):
            return cls(rank, card.who, error.kind, error.cause, error.cure)
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return cls(rank, card.who, ErrorKind.PEER_LOST, text, "See that rank")

    def error(self) -> CommError:
        return CommError(self.kind, "connect", self.said("has"), self.cure)

    def said(self, tense: str = "had") -> str:
        return f"rank {self.rank} ({self.who}) {tense} given up: {self.cause}"


class Card(msgspec.Struct, frozen=True):
    """Who connects as a rank.

    `answers` is the nonce of the card of rank 0 that this one answers.  `gone` is why the
    process connects no longer, or ``None`` while it does.
    """

    nonce: bytes
    size: int
    generation: Generation
    pid: int
    host: str
    hello: bytes = b""
    answers: bytes = b""
    gone: Failure | None = None

    @classmethod
    def of(cls, size: int, generation: Generation) -> Card:
        """A fresh card of this process."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return cls(nonce, size, generation, os.getpid(), socket.gethostname())

    @property
    def who(self) -> str:
        return f"pid {self.pid} on {self.host}"


_card = msgspec.msgpack.Decoder(Card)
_roster = msgspec.msgpack.Decoder(tuple[Card, ...])
_seen = msgspec.msgpack.Decoder(tuple[bytes, ...])
_failure = msgspec.msgpack.Decoder(Failure)


def encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def decode_card(data: bytes) -> Card | None:
    return _decode(_card, data) if data else None


def decode_roster(data: bytes) -> Sequence[Card] | None:
    return _decode(_roster, data) if data else None


def decode_seen(data: bytes) -> Sequence[bytes]:
    return _decode(_seen, data) if data else ()


def decode_failure(data: bytes) -> Failure | None:
    return _decode(_failure, data) if data else None


def _decode(decoder: Any, data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise refusal(
            f"the store holds something that this commlayer does not understand ({error})",
            "Install the same commlayer on all ranks, or use another address or name",
        ) from error
