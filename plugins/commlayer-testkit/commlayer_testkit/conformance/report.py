"""The certificate: what was judged, of what, on what, and what it does not prove."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from commlayer.errors import CommError, ErrorKind
from commlayer_testkit.conformance.clauses import VERSION
from commlayer_testkit.conformance.deviations import (
    Deviation,
    DeviationKind,
    Deviations,
    complaints,
)
from commlayer_testkit.conformance.probes.facts import fact_names
from commlayer_testkit.conformance.probes.report import ProbeReport
from commlayer_testkit.conformance.probes.report import Verdict as Measured
from commlayer_testkit.conformance.rules import Level, Rule
from commlayer_testkit.conformance.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from commlayer_testkit.conformance.subject import Subject

SCHEMA = "commlayer-conformance/1"

_LIMITS = (
    "It speaks for the versions, the host and the run that it names, and for no other.",
    "L1 is simulated: it shows that the library is safe on the declared facts, not that the "
    "transport has them. Schedules are covered within the stated bounds only.",
    "L2 and L4 ran between processes of one host; nothing was sent between hosts.",
)


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the kit.

    `level` is the highest level reached, or ``None``; `errors` are the failures
    and stale deviations, by rule; `measured` is a probe report, if one was given.
    """

    schema: str
    specification: str
    backend: str
    versions: dict[str, str]
    host: dict[str, str]
    date: str
    facts: dict[str, Any]
    measured: ProbeReport | None
    asked: Level
    level: Level | None
    simulated_only: bool
    verdicts: tuple[Verdict, ...]
    deviations: tuple[Deviation, ...]
    errors: dict[str, str]
    does_not_prove: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the level that was asked for is reached, with no error."""
        return not self.errors and self.level == self.asked

    def encode(self) -> bytes:
        """As indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def decode(text: bytes) -> Certificate:
    """Read a certificate; raises `CommError` (CONFIG) for anything else."""
    try:
        found = msgspec.json.decode(text, type=Certificate)
    except msgspec.MsgspecError as error:
        raise _unreadable(str(error)) from error
    if found.schema != SCHEMA:
        raise _unreadable(f"its schema is {found.schema!r}, and this commlayer reads {SCHEMA!r}")
    return found


def _unreadable(cause: str) -> CommError:
    return CommError(
        ErrorKind.CONFIG, "certificate", cause, "Write it anew: commlayer conformance NAME --json"
    )


def certify(
    subject: Subject,
    asked: Level,
    verdicts: Iterable[Verdict],
    deviations: Deviations,
    measured: ProbeReport | None = None,
) -> Certificate:
    """Put the verdicts of one run together.  Rules of `asked` without one are errors."""
    verdicts = tuple(verdicts)
    rules = subject.rules(asked)
    expected = {rule.id: deviations[rule.id] for rule in rules if rule.id in deviations}
    errors = complaints(verdicts, expected, [rule.id for rule in rules])
    errors |= {f"fact {fact}": text for fact, text in overclaimed(measured)}
    level = _reached(rules, verdicts, expected, errors)
    sent = {rule.id for rule in subject.rules() if rule.level not in (Level.L0, Level.L1)}
    real = [v for v in verdicts if v.outcome is Outcome.PASSED and v.rule in sent]
    loaded = subject.loaded
    return Certificate(
        schema=SCHEMA,
        specification=VERSION,
        backend=subject.name,
        versions={
            "commlayer": _version("commlayer"),
            loaded.distribution: loaded.version,
            "python": platform.python_version(),
            **loaded.versions(),
        },
        host={"system": platform.system(), "machine": platform.machine()},
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        facts=subject.semantics.facts(),
        measured=measured,
        asked=asked,
        level=level,
        simulated_only=not real,
        verdicts=verdicts,
        deviations=tuple(expected.values()),
        errors=errors,
        does_not_prove=(*_LIMITS, *_untried(measured)),
    )


def _untried(measured: ProbeReport | None) -> tuple[str, ...]:
    if measured is None:
        return ("Facts are declared, not tried: no probe report was given.",)
    names = untried(measured)
    return (f"Declared, not tried: {', '.join(names)}.",) if names else ()


def bound(measured: ProbeReport, subject: Subject) -> ProbeReport:
    """`measured`, if it is a whole report of this backend, on these versions and this host.

    Raises `CommError` (CONFIG) naming what it is of instead.
    """
    now = {"torch": str(torch.__version__), **subject.loaded.versions()}
    then = {part: measured.versions.get(part) for part in now}
    missing = sorted(set(fact_names()) - {fact.fact for fact in measured.facts})
    cause = ""
    if measured.c10d or measured.name != subject.name:
        what = "c10d backend" if measured.c10d else "backend"
        cause = f"it is of {what} {measured.name!r}"
    elif then != now:
        cause = f"it is of {then}, and this is {now}"
    elif measured.host != platform.node():
        cause = f"it is of host {measured.host!r}, and this is {platform.node()!r}"
    elif missing:
        cause = f"it lacks {', '.join(missing)}"
    if cause:
        raise CommError(
            ErrorKind.CONFIG,
            f"measured facts for backend {subject.name!r}",
            cause,
            f"Measure here and now: commlayer probe {subject.name} --json",
        )
    return measured


def untried(measured: ProbeReport | None) -> tuple[str, ...]:
    """The facts that are declared, and that nobody has tried."""
    tried = () if measured is None else measured.facts
    known = {fact.fact for fact in tried if fact.verdict is not Measured.NOT_MEASURED}
    return tuple(name for name in fact_names() if name not in known)


def overclaimed(measured: ProbeReport | None) -> list[tuple[str, str]]:
    """Facts of which more is declared than was measured."""
    found = measured.with_verdict(Measured.OVER_CLAIMED) if measured else ()
    return [
        (fact.fact, f"over-claimed: declared {fact.declared}, measured {fact.measured}")
        for fact in found
    ]


def _reached(
    rules: Iterable[Rule],
    verdicts: Iterable[Verdict],
    deviations: Deviations,
    errors: dict[str, str],
) -> Level | None:
    """The highest level of which, and below which, every rule holds or is excused.

    A level of which nothing applies is passed over; a deviation of kind
    ``broken`` excuses nothing.  An over-claimed fact leaves L1 at most.
    """
    given = {verdict.rule: verdict.outcome for verdict in verdicts}
    rules, reached = list(rules), None
    for level in Level:
        outcomes = []
        for rule in rules:
            if rule.level is level:
                excuse = deviations.get(rule.id)
                excused = excuse is not None and excuse.kind is not DeviationKind.BROKEN
                held = given.get(rule.id) in (Outcome.PASSED, Outcome.NOT_APPLICABLE)
                if rule.id in errors or not (held or excused):
                    return reached
                outcomes.append(given.get(rule.id))
        if any(outcome is not Outcome.NOT_APPLICABLE for outcome in outcomes):
            if level is Level.L2 and any(name.startswith("fact ") for name in errors):
                return reached
            reached = level
    return reached


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def compare(before: Certificate, after: Certificate) -> list[tuple[str, str, str]]:
    """What differs between two certificates: name, before, after."""
    rows: list[tuple[str, str, str]] = []

    def row(name: str, one: object, two: object) -> None:
        if one != two:
            rows.append((name, _text(one), _text(two)))

    row("backend", before.backend, after.backend)
    row("specification", before.specification, after.specification)
    row("level reached", before.level, after.level)
    for name, one, two in _pairs(before.versions, after.versions):
        row(f"version of {name}", one, two)
    for name, one, two in _pairs(_flat(before.facts), _flat(after.facts)):
        row(f"fact {name}", one, two)
    outcomes = [{v.rule: v.outcome for v in side.verdicts} for side in (before, after)]
    for name, one, two in _pairs(*outcomes):
        row(name, one, two)
    kinds = [{d.rule: d.kind for d in side.deviations} for side in (before, after)]
    for name, one, two in _pairs(*kinds):
        row(f"deviation {name}", one, two)
    return rows


def regressions(before: Certificate, after: Certificate) -> list[str]:
    """Rules that passed before and do not now, and a level that is lower."""
    outcomes = {v.rule: v.outcome for v in after.verdicts}
    lost = [
        v.rule
        for v in before.verdicts
        if v.outcome is Outcome.PASSED and outcomes.get(v.rule) is not Outcome.PASSED
    ]
    reached = [side.level.value if side.level else "" for side in (before, after)]
    return lost + ["level reached"] * (reached[1] < reached[0])


def _pairs(one: dict[str, Any], two: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    return [(name, one.get(name), two.get(name)) for name in dict.fromkeys([*one, *two])]


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": fact for inner, fact in value.items()}
        else:
            flat[name] = value
    return flat


def _text(value: object) -> str:
    if value is None:
        return "-"
    return str(getattr(value, "value", value))
