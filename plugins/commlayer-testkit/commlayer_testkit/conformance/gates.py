"""Conditions on declared facts under which clauses mean something."""

from __future__ import annotations

from commlayer.semantics import Order, Poll, PostMayBlock, Threads, WaitBlocks
from commlayer_testkit.conformance.rules import Gate

HOST = Gate("p2p.wait_blocks is host", lambda s: s.p2p.wait_blocks is WaitBlocks.HOST)
HOST_MEMORY = Gate("devices has cpu", lambda s: "cpu" in s.devices)
STREAM = Gate("p2p.wait_blocks is stream", lambda s: s.p2p.wait_blocks is WaitBlocks.STREAM)
ANY_THREAD = Gate(
    "threads is not funneled: other threads may drive", lambda s: s.threads is not Threads.FUNNELED
)
UNBLOCKED_POSTS = Gate(
    "p2p.post_may_block is never", lambda s: s.p2p.post_may_block is PostMayBlock.NEVER
)
PER_TAG = Gate("p2p.order is per_tag", lambda s: s.p2p.order is Order.PER_TAG)
SEVERAL_OUTSTANDING = Gate(
    "p2p.max_outstanding_per_pair is 0 or above 3",
    lambda s: s.p2p.max_outstanding_per_pair == 0 or s.p2p.max_outstanding_per_pair > 3,
)
TAGS = Gate("tags", lambda s: s.tags)
EXACT_POLL = Gate("p2p.poll is exact", lambda s: s.p2p.poll is Poll.EXACT)
REPEATABLE = Gate("p2p.wait_repeatable", lambda s: s.p2p.wait_repeatable)
EAGER = Gate("p2p.eager_bytes is above 0", lambda s: s.p2p.eager_bytes > 0)
UNFINISHED = Gate(
    "p2p.eager_bytes is below 4 MiB: a send of that size waits for its receive",
    lambda s: s.p2p.eager_bytes < 4 << 20,
)
WAITED_IN = Gate(
    "p2p.poll is not exact: the library waits inside the transport",
    lambda s: s.p2p.poll is not Poll.EXACT or s.p2p.wait_blocks is WaitBlocks.STREAM,
)
