"""What a check finds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Status = Literal["ok", "absent", "warning", "failed"]


class Check(msgspec.Struct, frozen=True):
    """One thing that was looked at; `cure` says what to do where it is not ``ok``.

    ``absent`` is a backend that cannot run here, which matters only to who wants it.
    """

    name: str
    status: Status
    found: str
    cure: str = ""


class Diagnosis(msgspec.Struct, frozen=True):
    """Everything that was found.  `facts` are not judged; `checks` are."""

    facts: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing has failed; warnings do not count."""
        return not any(check.status == "failed" for check in self.checks)
