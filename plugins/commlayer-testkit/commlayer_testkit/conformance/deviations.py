"""What a vendor says will not hold: a TOML file in the vendor's own repository.

::

    [[deviation]]
    rule = "L4-dead-peer"
    kind = "not_yet"
    reason = "the watchdog lands in 2.1"
    issue = "https://example.org/issues/7"
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.conformance.clauses import PROMISES
from commlayer_testkit.conformance.rules import Rule, all_rules
from commlayer_testkit.conformance.verdict import Outcome, Verdict


class DeviationKind(str, Enum):
    """Why a rule is expected to fail."""

    NOT_IMPLEMENTED = "not_implemented"
    """The transport offers no such thing."""
    NOT_YET = "not_yet"
    """It is planned; `issue` follows it."""
    NEVER = "never"
    """By design."""
    BROKEN = "broken"
    """It is a defect; the level is not reached."""


class Deviation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rule that is expected to fail."""

    rule: str
    kind: DeviationKind
    reason: str
    issue: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    deviation: tuple[Deviation, ...] = ()


Deviations = Mapping[str, Deviation]
"""By the id of the rule."""


def load(path: str | os.PathLike[str], rules: Iterable[Rule] | None = None) -> Deviations:
    """Read a file of deviations from `rules` (default: the kit's).

    Raises `CommError` (CONFIG) for a file that cannot be read, a malformed
    entry, an excuse for a promise of the handle (`PROMISES`), one without reason or
    issue, an unknown rule, or a rule named twice.
    """
    try:
        entries = msgspec.toml.decode(Path(path).read_bytes(), type=_File).deviation
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _refusal(path, str(error)) from error
    known = {rule.id for rule in (all_rules() if rules is None else rules)}
    found: dict[str, Deviation] = {}
    for entry in entries:
        if entry.rule not in known:
            raise _refusal(path, f"there is no rule {entry.rule!r}")
        if entry.rule in found:
            raise _refusal(path, f"rule {entry.rule!r} is named twice")
        clause = entry.rule.partition("-")[2]
        if clause in PROMISES and entry.kind is not DeviationKind.BROKEN:
            raise _refusal(
                path,
                f"rule {entry.rule!r} cannot be excused: the handle's promise rests on it; "
                "only kind broken may name it",
            )
        if not (entry.reason.strip() and entry.issue.strip()):
            raise _refusal(path, f"rule {entry.rule!r} needs a reason and an issue")
        found[entry.rule] = entry
    return found


def _refusal(path: object, cause: str) -> CommError:
    return CommError(
        ErrorKind.CONFIG,
        f"deviations in {path}",
        cause,
        "See `commlayer conformance --specification` for rules; kinds: "
        + ", ".join(kind.value for kind in DeviationKind),
    )


def complaint(verdict: Verdict, deviation: Deviation | None) -> str:
    """Why a verdict is an error, given the deviation of its rule; nothing when it is none."""
    if deviation is None:
        return (verdict.message or "it failed") if verdict.outcome is Outcome.FAILED else ""
    if verdict.outcome is Outcome.FAILED:
        return ""
    if verdict.outcome is Outcome.PASSED:
        return f"a deviation says that it fails ({deviation.reason}), and it passes"
    return f"a deviation says that it fails, and it was not judged: {verdict.message}"


def complaints(
    verdicts: Iterable[Verdict], deviations: Deviations, asked: Collection[str]
) -> dict[str, str]:
    """Every error of a run, by rule: failures, stale deviations, rules that have no verdict."""
    given = {verdict.rule: verdict for verdict in verdicts}
    found = {
        rule: text
        for rule, verdict in given.items()
        if (text := complaint(verdict, deviations.get(rule)))
    }
    return found | {rule: "it was not judged at all" for rule in asked if rule not in given}
