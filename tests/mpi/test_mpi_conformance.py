"""Rules of the specification in which MPI differs most from torch's groups.

All of them: ``commlayer conformance mpi --level L4``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from commlayer_testkit.conformance import Lab, Outcome, Subject, judge
from commlayer_testkit.conformance.rules import find_rule

RULES = [
    "L2-fresh-interpreters",
    "L2-close-in-flight",
    "L2-exit",
    "L2-fork",
    "L2-broadcast",
    "L2-native-poll",
    "L2-native-eager",
    "L4-silent-peer",
]


@pytest.fixture(scope="module")
def lab(needs_mpi: None) -> Iterator[Lab]:
    with Lab(Subject("mpi")) as lab:
        yield lab


@pytest.mark.parametrize("name", RULES)
def test_rule_holds(name: str, lab: Lab) -> None:
    verdict = judge(find_rule(name), lab)
    if name == "L2-native-eager" and not lab.subject.semantics.p2p.eager_bytes:
        assert verdict.outcome is Outcome.NOT_APPLICABLE
    else:
        assert verdict.outcome is Outcome.PASSED, verdict.message
