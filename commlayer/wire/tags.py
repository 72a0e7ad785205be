"""How channels and tags map to the tags of one native communicator."""

from __future__ import annotations

import re
from collections.abc import Iterable

BUILTIN_CHANNELS = ("broadcast", "control", "data", "fold")
MAX_TAG = (1 << 16) - 1
"""Largest tag that a caller may use."""

OBJECTS = "objects"
BROADCAST = "broadcast"
SLICES = "slices"
BARRIER = "barrier"
CONTROL_LANE = ("control", "control")
"""Channel and tag of the library's own messages."""


def objects(tag: str) -> str:
    """The tag of the lane of objects and dicts with a caller's `tag`; `OBJECTS` for 0."""
    return OBJECTS if tag == "0" else f"{OBJECTS}:{tag}"


RESERVED = ".reserved"
"""Follows the tag of a lane in the name of its device lane for messages of one declared size."""

_RESERVED = (BROADCAST, CONTROL_LANE[1], SLICES, BARRIER)
_CODE_BITS = 17
_SLOT_BITS = 3
_OWN = (1 << 10) - 1
"""In place of a channel: the library's own lanes of all channels.  There are fewer channels."""
_NUMBERED = re.compile(f"0|(?:{OBJECTS}:)?[1-9][0-9]{{0,4}}")


class TagMap:
    """Native tags: 10 bits of channel, 3 of slot, 17 of the lane's own tag.

    Slot 0 carries headers, the others payload.  The order of `extra` does not
    matter; all ranks must name the same set.
    """

    def __init__(self, extra: Iterable[str]) -> None:
        self.channels = (*BUILTIN_CHANNELS, *sorted(set(extra) - set(BUILTIN_CHANNELS)))
        self._index = {channel: index for index, channel in enumerate(self.channels)}

    def native(self, channel: str, tag: str) -> int:
        """The native tag of the headers of lane (`channel`, `tag`)."""
        index = self._index[channel]
        if tag in _RESERVED:
            index, code = _OWN, index * len(_RESERVED) + _RESERVED.index(tag)
        elif tag.startswith(OBJECTS):
            code = MAX_TAG + 1 + int(tag[len(OBJECTS) + 1 :] or 0)
        else:
            code = int(tag)
        return (index << (_CODE_BITS + _SLOT_BITS)) | code

    @staticmethod
    def payload(native: int, slot: int) -> int:
        """The native tag of payload slot `slot` of the lane with header tag `native`."""
        return native | (slot << _CODE_BITS)

    def valid(self, channel: str, tag: str) -> bool:
        """Whether the lane can exist; for names that come from a peer."""
        if channel not in self._index:
            return False
        if tag == OBJECTS or tag in _RESERVED:
            return True
        return _NUMBERED.fullmatch(tag) is not None and int(tag.rpartition(":")[2]) <= MAX_TAG
