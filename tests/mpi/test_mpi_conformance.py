"""Rules of the specification in which MPI differs most from torch's groups.

All of them: ``commlayer conformance mpi --level L4``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from commlayer_testkit.conformance import Bench, Outcome, Subject, judge
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
def bench(needs_mpi: None) -> Iterator[Bench]:
    with Bench(Subject("mpi")) as bench:
        yield bench


@pytest.mark.parametrize("name", RULES)
def test_rule_holds(name: str, bench: Bench) -> None:
    verdict = judge(find_rule(name), bench)
    if name == "L2-native-eager" and not bench.subject.semantics.p2p.eager_bytes:
        assert verdict.outcome is Outcome.NOT_APPLICABLE
    else:
        assert verdict.outcome is Outcome.PASSED, verdict.message
