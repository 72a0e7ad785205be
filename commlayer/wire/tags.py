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
CONTROL_LANE = ("control", "control")
"""Channel and tag of the library's own messages."""

RESERVED = ".reserved"
"""Follows the tag of a lane in the name of its device lane for messages of one declared size."""

_RESERVED = (OBJECTS, BROADCAST, CONTROL_LANE[1], SLICES)
_CODE_BITS = 17
_SLOT_BITS = 3
_NUMBER = re.compile("0|[1-9][0-9]{0,4}")


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
        code = _RESERVED.index(tag) if tag in _RESERVED else len(_RESERVED) + int(tag)
        return (self._index[channel] << (_CODE_BITS + _SLOT_BITS)) | code

    @staticmethod
    def payload(native: int, slot: int) -> int:
        """The native tag of payload slot `slot` of the lane with header tag `native`."""
        return native | (slot << _CODE_BITS)

    def valid(self, channel: str, tag: str) -> bool:
        """Whether the lane can exist; for names that come from a peer."""
        return channel in self._index and (
            tag in _RESERVED or (_NUMBER.fullmatch(tag) is not None and int(tag) <= MAX_TAG)
        )
