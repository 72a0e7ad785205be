"""What a mutant is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commlayer_testkit.conformance import Subject

HANGS = "does not come to an end"
PEER_LOST = r"errors\.md#peer_lost"
"""Of a group that was closed under its ranks: by schedule, one of them tells and in other words."""
SPOILT = r"errors\.md#protocol|did not arrive whole"
"""Of a source that was overwritten: by its bytes, a header or what stands behind one."""


@dataclass(frozen=True)
class Mutant:
    """A backend that breaks one promise.

    `breaks` says which, in words.  Every rule of `killed_by` must fail on it, with
    a message that `says` (a regular expression) finds; the first is the rule of the
    clause that it breaks.  `schedules` bounds the simulated searches.
    """

    name: str
    breaks: str
    subject: Callable[[], Subject]
    killed_by: tuple[str, ...]
    says: str = ""
    schedules: int = 60

    @property
    def hangs(self) -> bool:
        """Whether its ranks may not come to an end, so that waiting long for them is idle."""
        return HANGS in self.says
