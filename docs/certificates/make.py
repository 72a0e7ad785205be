"""Writes the certificates beside this file, and their matrix.  ``make certificates``.

With names as arguments, only those are run; the matrix is always of all files.
"""

from __future__ import annotations

import sys
from pathlib import Path

from commlayer_testkit.conformance import Lab, Level, Outcome, Subject, all_rules, judge
from commlayer_testkit.conformance.report import Certificate, certify, decode

HERE = Path(__file__).parent
LEVELS = {
    "gloo": Level.L2,
    "mpi": Level.L4,
    "nccl": Level.L1,
    "oneccl": Level.L1,
    "npu": Level.L1,
}
ELSEWHERE = ("oneccl_cpu",)
"""Certificates of backends for tests only, written by the target that makes them run."""

MARKS = {
    Outcome.PASSED: "pass",
    Outcome.FAILED: "**FAIL**",
    Outcome.NOT_APPLICABLE: "–",
    Outcome.NOT_RUN: "not run",
}
HEAD = """# Certificates

Written by `make certificates`; the JSON files beside this page are the certificates
themselves, with the facts, the evidence of each rule (seeds, schedules, bounds, ranks) and
what is not proved. `commlayer conformance compare A.json B.json` compares two.

The rules are those of [the specification](../specification.md). *Simulated* means that
nothing was sent: the library ran on the declared facts, in the simulator.

"""


def main(names: list[str]) -> int:
    for name in names or LEVELS:
        certificate = run(name, LEVELS[name])
        (HERE / f"{name}.json").write_bytes(certificate.encode() + b"\n")
        print(f"{name}: {reached(certificate)}; {'; '.join(certificate.errors) or 'no error'}")
    certificates = [
        decode(file.read_bytes())
        for name in (*LEVELS, *ELSEWHERE)
        if (file := HERE / f"{name}.json").exists()
    ]
    (HERE / "README.md").write_text(matrix(certificates), "utf-8")
    return int(not all(certificate.ok for certificate in certificates))


def run(name: str, level: Level) -> Certificate:
    subject = Subject(name)
    with Lab(subject) as lab:
        verdicts = [judge(rule, lab) for rule in subject.rules(level)]
    return certify(subject, level, verdicts, {})


def reached(certificate: Certificate) -> str:
    level = certificate.level.value if certificate.level else "none"
    return f"{level}, simulated" if certificate.simulated_only else f"{level}, on processes"


def matrix(certificates: list[Certificate]) -> str:
    """The page: one column a certificate, one row a rule."""
    given = [{v.rule: v.outcome for v in c.verdicts} for c in certificates]
    rules = [rule.id for rule in all_rules() if any(rule.id in outcomes for outcomes in given)]
    rows = [
        ["", *(f"[{c.backend}]({c.backend}.json)" for c in certificates)],
        ["---"] * (len(certificates) + 1),
        ["level reached", *(reached(c) for c in certificates)],
        ["specification", *(c.specification for c in certificates)],
        ["date", *(c.date for c in certificates)],
        ["versions", *(", ".join(map(" ".join, c.versions.items())) for c in certificates)],
        *([rule, *(MARKS[o[rule]] if rule in o else "" for o in given)] for rule in rules),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    limits = "\n".join(f"- {text}" for text in certificates[0].does_not_prove)
    return f"{HEAD}{table}\n\n## What they do not prove\n\n{limits}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
