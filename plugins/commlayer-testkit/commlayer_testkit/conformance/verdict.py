"""What became of a rule."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec


class CannotRun(Exception):
    """Raised by a check that finds nothing to run on; the text says what is missing."""


class NotApplicable(Exception):
    """Raised by a check that means nothing for this backend; the text says why."""


class Outcome(str, Enum):
    """How judging one rule ended."""

    PASSED = "passed"
    FAILED = "failed"
    """The clause does not hold; the message says how."""
    NOT_APPLICABLE = "not_applicable"
    """The declared facts, or how ranks start, make the clause meaningless; the message says
    which."""
    NOT_RUN = "not_run"
    """The rule applies and could not be run here, or was left out; the message says why."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one rule, with what it rests on.

    `evidence` holds numbers: of a simulated rule the seed, the schedules and
    whether they were exhausted; of a run on processes the ranks and digests.
    """

    rule: str
    outcome: Outcome
    message: str = ""
    evidence: dict[str, Any] = {}
    seconds: float = 0.0
