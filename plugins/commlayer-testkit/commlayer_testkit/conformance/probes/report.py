"""What a probe found: declared against measured, per fact."""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from commlayer.semantics import OperationSemantics, Semantics, SourceLifetime, WaitBlocks

SCHEMA = 1


class Verdict(str, Enum):
    """How a declared fact compares with what was measured."""

    CORRECT = "correct"
    OVER_CLAIMED = "over_claimed"
    """More is declared than the transport does: nothing built on it is safe."""
    UNDER_CLAIMED = "under_claimed"
    """The transport did better than declared: more could be declared."""
    NOT_MEASURED = "not_measured"
    """It cannot be measured here; the reason is given."""
    UNDECLARED = "undeclared"
    """It was measured, and there is no declaration to compare it with."""


class FactReport(msgspec.Struct, frozen=True, kw_only=True):
    """One fact, by its full name (``p2p.poll``, ``progress``).

    Values are plain (an enum's value, ``"all"`` for every dtype).  `measured` is
    ``None`` and `reason` says why where nothing was measured; `proven` is false
    for a value that was not refuted but cannot be proven.
    """

    fact: str
    verdict: Verdict
    declared: Any = None
    measured: Any = None
    evidence: tuple[str, ...] = ()
    repetitions: int = 0
    reason: str = ""
    proven: bool = True
    seconds: float = 0.0


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of one subject; encodes to JSON as it is."""

    schema: int = SCHEMA
    name: str
    c10d: bool
    """Whether a bare c10d backend was probed, without a plugin."""
    versions: dict[str, str]
    host: str = ""
    """The name of the machine that it ran on."""
    facts: tuple[FactReport, ...]
    seconds: float

    def with_verdict(self, verdict: Verdict) -> tuple[FactReport, ...]:
        return tuple(fact for fact in self.facts if fact.verdict is verdict)

    @property
    def certifiable(self) -> bool:
        """Whether no fact is over-claimed."""
        return not self.with_verdict(Verdict.OVER_CLAIMED)

    def measured_semantics(self) -> Semantics:
        """The measured facts; whatever was not measured or not proven has its weakest value."""
        facts: dict[str, Any] = {"p2p": {}, "collective": {}}
        for report in self.facts:
            if report.measured is not None and report.proven:
                kind, _, name = report.fact.rpartition(".")
                table = facts[kind] if kind else facts
                table[name] = None if report.measured == "all" else report.measured
        return msgspec.convert(facts, Semantics)

    def draft(self) -> str:
        """`measured_semantics` as Python source, to begin a plugin with."""
        measured = self.measured_semantics()
        reports = {report.fact: report for report in self.facts}
        lines = ["Semantics("]
        for kind in ("p2p", "collective"):
            lines.append(f"    {kind}=OperationSemantics(")
            operation = getattr(measured, kind)
            for name in OperationSemantics.__struct_fields__:
                value = getattr(operation, name)
                lines += _draft_line(" " * 8, name, value, reports.get(f"{kind}.{name}"))
            lines.append("    ),")
        for name in Semantics.__struct_fields__:
            if name not in ("p2p", "collective"):
                lines += _draft_line(" " * 4, name, getattr(measured, name), reports.get(name))
        return "\n".join([*lines, ")"])


def _draft_line(indent: str, name: str, value: Any, report: FactReport | None) -> list[str]:
    if report is None:
        return []
    if report.measured is None:
        return [f"{indent}# {name}: not measured, {report.reason}"]
    if not report.proven:
        return [f"{indent}# {name}: {report.measured} was not refuted, which does not prove it"]
    source = f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else repr(value)
    line = f"{indent}{name}={source},"
    if len(line) <= 100 or not isinstance(value, tuple):
        return [line]
    return [f"{indent}{name}=(", *(f"{indent}    {item!r}," for item in value), f"{indent}),"]


def plain(fact: str, value: Any) -> Any:
    """A fact's value as JSON has it."""
    return msgspec.to_builtins(value)


def compare(fact: str, declared: Any, measured: Any, *, proven: bool) -> Verdict:
    """How `declared` stands to `measured`.

    Enumerations are ordered by definition, from weakest to strongest; where values
    are merely different, a difference is an over-claim.  A value that is not proven
    can only refute a stronger claim.
    """
    name = fact.rpartition(".")[2]
    strength = _strength(name, declared, measured)
    if strength == 0:
        return Verdict.CORRECT
    if strength > 0:
        return Verdict.OVER_CLAIMED
    return Verdict.UNDER_CLAIMED if proven else Verdict.NOT_MEASURED


def _strength(name: str, declared: Any, measured: Any) -> int:
    """Below zero where `declared` is weaker than `measured`, above where it is stronger."""
    if declared == measured:
        return 0
    if isinstance(declared, (WaitBlocks, SourceLifetime)):
        return 1
    if isinstance(declared, Enum):
        order = list(type(declared))
        return order.index(declared) - order.index(measured)
    if name == "devices":
        more, less = set(declared) - set(measured), set(measured) - set(declared)
        return 1 if more else -1 if less else 0
    if name == "max_outstanding_per_pair":
        return -1 if measured == 0 or 0 < declared < measured else 1
    if name == "contiguous_only":
        return -1 if declared else 1
    return -1 if declared < measured else 1
