"""What counts as an over-claim and as an under-claim, fact by fact."""

from __future__ import annotations

from typing import Any

import pytest
from commlayer_testkit.conformance.probes.report import Verdict, compare

from commlayer.semantics import (
    DroppedWork,
    Order,
    Poll,
    PostMayBlock,
    SourceLifetime,
    Threads,
    WaitBlocks,
)

WEAKER_FIRST = [
    ("p2p.poll", Poll.BLOCKS, Poll.MAY_BE_EARLY),
    ("p2p.poll", Poll.MAY_BE_EARLY, Poll.NEVER_BEFORE_WAIT),
    ("p2p.poll", Poll.NEVER_BEFORE_WAIT, Poll.EXACT),
    ("p2p.dropped_work", DroppedWork.UNSAFE, DroppedWork.CONTINUES),
    ("p2p.post_may_block", PostMayBlock.ALWAYS, PostMayBlock.FIRST_USE),
    ("p2p.order", Order.UNORDERED, Order.PER_TAG),
    ("p2p.wait_repeatable", False, True),
    ("p2p.contiguous_only", True, False),
    ("p2p.eager_bytes", 0, 64),
    ("p2p.max_outstanding_per_pair", 1, 0),
    ("p2p.max_outstanding_per_pair", 1, 8),
    ("devices", ("cpu",), ("cpu", "cuda")),
]


@pytest.mark.parametrize(("fact", "weaker", "stronger"), WEAKER_FIRST, ids=str)
def test_strength_decides(fact: str, weaker: Any, stronger: Any) -> None:
    assert compare(fact, stronger, weaker, proven=True) is Verdict.OVER_CLAIMED
    assert compare(fact, weaker, stronger, proven=True) is Verdict.UNDER_CLAIMED
    assert compare(fact, weaker, weaker, proven=True) is Verdict.CORRECT
    assert compare(fact, stronger, stronger, proven=True) is Verdict.CORRECT


@pytest.mark.parametrize(
    ("fact", "one", "other"),
    [
        ("p2p.wait_blocks", WaitBlocks.HOST, WaitBlocks.STREAM),
        ("p2p.source_lifetime", SourceLifetime.REFERENCE, SourceLifetime.RECORD_STREAM),
    ],
    ids=str,
)
def test_a_fact_without_an_order_is_over_claimed_either_way(
    fact: str, one: Any, other: Any
) -> None:
    assert compare(fact, one, other, proven=True) is Verdict.OVER_CLAIMED
    assert compare(fact, other, one, proven=True) is Verdict.OVER_CLAIMED


def test_the_order_of_devices_does_not_matter() -> None:
    assert compare("devices", ("b", "a"), ("a", "b"), proven=True) is Verdict.CORRECT


def test_what_cannot_be_proven_can_only_refute() -> None:
    multiple, funneled = Threads.MULTIPLE, Threads.FUNNELED
    assert compare("threads", funneled, multiple, proven=False) is Verdict.NOT_MEASURED
    assert compare("threads", multiple, multiple, proven=False) is Verdict.CORRECT
    assert compare("threads", multiple, funneled, proven=False) is Verdict.OVER_CLAIMED
