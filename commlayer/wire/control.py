"""Messages between the libraries of two ranks, on a lane of their own."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from commlayer.errors import About
from commlayer.wire.frame import protocol_error
from commlayer.wire.rank_state import RankState
from commlayer.wire.tags import RESERVED

LaneName = tuple[str, str]
"""Channel and tag of a lane; its direction follows from who names it."""

MAX_BLAME = 1024

Taken = tuple[LaneName, int]
"""A lane and how many of its messages were received: the first that was not has this number."""


class Blame(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Why a rank leaves: what has become of `rank`, which may be the rank itself."""

    rank: Annotated[int, Meta(ge=0)]
    what: Annotated[str, Meta(max_length=MAX_BLAME)]
    cure: Annotated[str, Meta(max_length=MAX_BLAME)]


class Bye(msgspec.Struct, tag="bye", array_like=True, frozen=True, forbid_unknown_fields=True):
    """I am closing.

    `receives` are the lanes on which I receive from you, and how much of each
    I did: end each with a goodbye.  `sends` are the lanes on which I have
    undelivered messages for you: take them in and throw them away.  `sent` are
    the lanes whose messages have all left me, and may not have been asked for:
    take them in and keep them.  `blame` says that I would not leave but for an error.
    """

    receives: tuple[Taken, ...]
    sends: tuple[LaneName, ...]
    sent: tuple[LaneName, ...] = ()
    blame: Blame | None = None

    def lanes(self) -> tuple[LaneName, ...]:
        """All that it names."""
        return (*_names(self.receives), *self.sends, *self.sent)


class ByeAck(
    msgspec.Struct, tag="bye_ack", array_like=True, frozen=True, forbid_unknown_fields=True
):
    """The answer to `Bye`, with the same meaning the other way; the last control message."""

    receives: tuple[Taken, ...]
    sends: tuple[LaneName, ...]

    def lanes(self) -> tuple[LaneName, ...]:
        """All that it names."""
        return (*_names(self.receives), *self.sends)


class LaneBroken(
    msgspec.Struct, tag="lane_broken", array_like=True, frozen=True, forbid_unknown_fields=True
):
    """I receive no more on `lane` than `taken` messages, because of what you sent next."""

    lane: LaneName
    taken: int
    cause: str

    def lanes(self) -> tuple[LaneName, ...]:
        """All that it names."""
        return (self.lane,)


class Ask(msgspec.Struct, tag="ask", array_like=True, frozen=True, forbid_unknown_fields=True):
    """What do you wait for?  `stalled` says why I ask: something has not moved for too long."""

    number: int
    stalled: bool


class Answer(
    msgspec.Struct, tag="answer", array_like=True, frozen=True, forbid_unknown_fields=True
):
    """The answer to every `Ask` up to that number."""

    number: int
    state: RankState


class OpenLane(
    msgspec.Struct, tag="open_lane", array_like=True, frozen=True, forbid_unknown_fields=True
):
    """About the communicator of a device lane, which goes `up` from the lower rank or not.

    `stage` is ``"want"`` (from the higher rank: lead), ``"ready"`` (from the lower one, which
    waits for the answer), ``"go"`` (I begin now, too) or ``"refuse"``, for `cause`.
    """

    lane: LaneName
    up: bool
    stage: str
    cause: str = ""

    def lanes(self) -> tuple[LaneName, ...]:
        """All that it names."""
        channel, tag = self.lane
        return ((channel, tag.removesuffix(RESERVED)),)


Control = Bye | ByeAck | LaneBroken | Ask | Answer | OpenLane

_decoder = msgspec.msgpack.Decoder(Control)
_encoder = msgspec.msgpack.Encoder()


def _names(taken: tuple[Taken, ...]) -> tuple[LaneName, ...]:
    return tuple(name for name, _ in taken)


def encode_control(message: Control) -> bytes:
    """The bytes of a control message."""
    return _encoder.encode(message)


def decode_control(data: bytes, where: About) -> Control:
    """Decode a control message; raises `CommError` (PROTOCOL) if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise protocol_error(where, f"the control message cannot be decoded ({error})") from error
