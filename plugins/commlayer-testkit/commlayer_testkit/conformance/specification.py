"""The specification page, made from the clauses and the rules."""

from __future__ import annotations

from commlayer_testkit.conformance.clauses import SECTIONS, VERSION
from commlayer_testkit.conformance.rules import Level, Rule, all_rules

_HEAD = """# Specification {version}

What commlayer promises on every backend, and what a backend owes for it. Each clause has
a stable name and the rules that check it; a rule's id is its level and the clause. A rule
whose condition on the declared facts does not hold is not applicable, and never passed.

This page is generated: `commlayer conformance --specification`.

| level | what runs | rules |
|---|---|---|
"""


def specification() -> str:
    """The page, as Markdown."""
    by_clause: dict[str, list[Rule]] = {}
    by_level: dict[Level, int] = dict.fromkeys(Level, 0)
    for rule in all_rules():
        by_clause.setdefault(rule.clause.id, []).append(rule)
        by_level[rule.level] += 1
    lines = [_HEAD.format(version=VERSION).rstrip("\n")]
    lines += [
        f"| {level.value} {level.heading} | {_WHAT[level]} | {count} |"
        for level, count in by_level.items()
    ]
    for section, clauses in SECTIONS.items():
        lines += ["", f"## {section}"]
        for identifier, text in clauses.items():
            lines += ["", f"### {identifier}", "", text, ""]
            lines += [_line(rule) for rule in by_clause[identifier]]
    return "\n".join(lines) + "\n"


def _line(rule: Rule) -> str:
    gates = "; ".join(gate.text for gate in rule.gates)
    return f"- **{rule.id}**: {rule.doc}" + (f" Only where {gates}." if gates else "")


_WHAT = {
    Level.L0: "nothing is sent",
    Level.L1: "the library on the declared facts, in the simulator",
    Level.L2: "the real transport, 2 and 4 processes of one host",
    Level.L3: "two devices of one host",
    Level.L4: "the real transport under stress, with ranks that stop or die",
}
