"""A certificate as a JUnit file, for continuous integration."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec

from commlayer_testkit.conformance.clauses import CLAUSES
from commlayer_testkit.conformance.report import Certificate
from commlayer_testkit.conformance.verdict import Outcome


def junit(certificate: Certificate) -> bytes:
    """One suite a level, one case a rule; an excused failure is skipped with its reason."""
    root = ElementTree.Element("testsuites", name=f"commlayer conformance {certificate.backend}")
    suites: dict[str, ElementTree.Element] = {}
    excuses = {deviation.rule: deviation for deviation in certificate.deviations}
    for verdict in certificate.verdicts:
        level, _, name = verdict.rule.partition("-")
        broken = CLAUSES[name].text if name in CLAUSES else verdict.rule
        if level not in suites:
            suites[level] = ElementTree.SubElement(root, "testsuite", name=level)
        case = ElementTree.SubElement(
            suites[level],
            "testcase",
            classname=f"{certificate.backend}.{level}",
            name=verdict.rule,
            time=str(verdict.seconds),
        )
        error, excuse = certificate.errors.get(verdict.rule), excuses.get(verdict.rule)
        if error:
            ElementTree.SubElement(case, "failure", message=broken).text = _printable(error)
        elif excuse is not None:
            text = f"{excuse.kind.value}: {excuse.reason} ({excuse.issue})"
            ElementTree.SubElement(case, "skipped", message=text)
        elif verdict.outcome is not Outcome.PASSED:
            text = f"{verdict.outcome.value}: {verdict.message}"
            ElementTree.SubElement(case, "skipped", message=_printable(text))
        if verdict.evidence:
            evidence = msgspec.json.encode(verdict.evidence).decode()
            ElementTree.SubElement(case, "system-out").text = evidence
    judged = {verdict.rule for verdict in certificate.verdicts}
    rest = {name: text for name, text in certificate.errors.items() if name not in judged}
    if rest:
        suite = ElementTree.SubElement(root, "testsuite", name="run")
        for name, text in rest.items():
            case = ElementTree.SubElement(
                suite, "testcase", classname=f"{certificate.backend}.run", name=name
            )
            ElementTree.SubElement(case, "failure", message=text)
    for suite in root:
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(len(suite.findall("testcase/failure"))))
        suite.set("skipped", str(len(suite.findall("testcase/skipped"))))
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written


def _printable(text: str) -> str:
    """Without the control characters that XML does not allow."""
    return "".join(c if c in "\n\t" or ord(c) >= 0x20 else "?" for c in text)
