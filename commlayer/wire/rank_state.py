"""What one rank says of what it waits for, as the others get it.

Every list and text is limited where it is decoded, and again where it is made.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_OPERATIONS = 64
MAX_LANES = 256
MAX_CHANNELS = 4096
MAX_THREADS = 8
MAX_NAME = 128
MAX_SITE = 512

_Name = Annotated[str, Meta(max_length=MAX_NAME)]
_Site = Annotated[str, Meta(max_length=MAX_SITE)]
_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class PendingOperation(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An operation that is not complete.

    `number` counts the messages of its lane, from 0, and is the same on both
    ranks; `step` counts the broadcasts of its channel, and is -1 for anything
    else.  `age` is in seconds since the post.  `awaited` says that a thread
    blocks for it, or has done so.
    """

    kind: _Name
    channel: _Name
    tag: _Name
    peer: _Count
    direction: Literal["send", "recv", "track"]
    number: int
    step: int
    nbytes: _Count
    age: float
    awaited: bool
    site: _Site | None


class LaneState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """How far a lane is.

    `count` is how many messages this rank has posted (`send`) or asked for
    (`recv`); `unclaimed` how many are here and were not asked for, the first of
    them for `seconds` (0 where that was not watched).
    """

    channel: _Name
    tag: _Name
    peer: _Count
    direction: Literal["send", "recv"]
    count: _Count
    unclaimed: _Count
    seconds: float


class ThreadState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where a thread of the program is: its line, and the library call that it is in, if any."""

    name: _Name
    site: _Site
    call: _Name


class RankState(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a rank waits for.

    `operations` are the oldest, those that may idle last; `omitted` were left out, of
    them or of `lanes`.
    `steps` is the number of broadcasts of each channel that has had one.
    `held_up` threads wait for room under the bounds.
    """

    rank: _Count
    host: _Name
    pid: _Count
    operations: Annotated[tuple[PendingOperation, ...], Meta(max_length=MAX_OPERATIONS)]
    lanes: Annotated[tuple[LaneState, ...], Meta(max_length=MAX_LANES)]
    omitted: _Count
    steps: Annotated[tuple[tuple[_Name, _Count], ...], Meta(max_length=MAX_CHANNELS)]
    held_up: _Count
    threads: Annotated[tuple[ThreadState, ...], Meta(max_length=MAX_THREADS)]
