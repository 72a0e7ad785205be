"""The written contract, clause by clause.  `docs/specification.md` is made from this and the rules.

`VERSION` changes with the meaning of any clause; a certificate names it.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "1.0"


@dataclass(frozen=True)
class Clause:
    """One promise.  `id` is stable; `text` is the whole of it."""

    id: str
    section: str
    text: str


SECTIONS: dict[str, dict[str, str]] = {
    "The plugin": {
        "named": "The backend loads by name through the registry, for this plugin API.",
        "interface": "The backend has the methods and parameters of `commlayer.backend`.",
        "viability": "`viability()` answers at once, the same each time, with a reason, and does "
        "not raise; what is not viable says what to install.",
        "facts": "The facts are a `Semantics`: they survive being written and read, and no two "
        "contradict each other.",
        "sources": "Every source that is given names an existing fact, and `versions()` are texts.",
        "core-accepts": "The core finds a sound way to drive the transport from its facts alone.",
        "options-refused": "An unknown option is refused with a `CommError` of kind CONFIG.",
    },
    "Handles": {
        "post-returns": "Below the bounds an asynchronous send or receive returns before the peer "
        "has posted anything, in both directions at once.",
        "wait-usable": "After `wait` the result is usable and the source may be overwritten.",
        "wait-again": "`wait` may be repeated, in any order, before and after completion and "
        "after `close`, with the same outcome.",
        "wait-threads": "Several threads may wait for one handle; all learn the outcome.",
        "timeout-harmless": "An expired timeout raises `CommTimeout` and changes nothing: the "
        "operation goes on, and a later wait succeeds.",
        "timeout-transfer": "A limit that expires while the message is under way changes nothing.",
        "timeout-values": "0 polls; negative limits and NaN raise `ValueError`; limits of any "
        "positive size are honoured.",
        "completed-exact": "`is_completed` is never true before the source may be overwritten or "
        "the result used.",
        "completed-unwaited": "`is_completed` becomes true without anybody waiting.",
        "error-repeats": "A failed operation raises the same error at every wait, and "
        "`exception()` returns it.",
        "dropped-handle": "Dropping a handle and its tensors changes nothing: the message arrives.",
        "idle": "A communicator that is idle for an hour, receives posted, works afterwards.",
        "busy-interpreter": "A thread that keeps the interpreter busy delays operations and does "
        "not stop them.",
    },
    "Retention and bounds": {
        "alive": "A source stays alive and unread memory unreleased until the transport has read "
        "it, whatever its size.",
        "released": "Buffers are released without a call of the user once their operations are "
        "complete, and nothing is left in the ledger.",
        "copy-on-post": "With `retention = copy_on_post` the source may be overwritten at once.",
        "bounded": "Sends in flight stay within `max_inflight_ops`; at the bound the next waits "
        "for room and gets it.",
        "bound-raises": "With `on_full = raise` a send at the bound raises FULL and leaves nothing "
        "behind.",
        "no-growth": "Memory, threads and file descriptors do not grow with the number of "
        "messages.",
    },
    "Messages": {
        "order": "Messages of one peer, channel and tag arrive in the order of their posts.",
        "tags-independent": "A message of one tag that nobody asks for holds up no other tag.",
        "channels-independent": "Traffic that waits on one channel holds up no other channel.",
        "peers-independent": "Traffic that waits for one peer holds up no other peer.",
        "values": "Every dtype, shape and size arrives bit by bit, empty and non-contiguous "
        "tensors included.",
        "dicts": "Tensor dicts and objects arrive equal, with the order of keys.",
        "broadcast": "Every rank gets each broadcast, with the width that the sender gave it.",
        "size-mismatch": "A message that does not fit its receive fails that receive (PROTOCOL) "
        "and no other: it is left to the next.",
        "late-peer": "A message waits for a peer that posts late, and for one that is slow.",
        "unexpected": "Messages that arrive before anybody asks are handed out in order.",
    },
    "Connecting and ending": {
        "absent-rank": "A rank that does not come is named within `connect_timeout`.",
        "fresh-interpreters": "Ranks that are new interpreters (spawned, not forked) connect and "
        "exchange.",
        "drain": "`drain` returns when every send is locally complete, and not before.",
        "close": "`close` delivers what was sent before it to a peer that still receives, names "
        "what it could not, and ends pending receives (CLOSED).",
        "close-in-flight": "Closing with undelivered sends ends within its limit and names them.",
        "exit": "A process that ends with an open communicator, at any moment, keeps its exit "
        "code and does not hang.",
        "fork": "After `fork` the child's communicator is closed and the parent's goes on.",
        "reconnect": "Ranks may connect again after a close.",
    },
    "Faults": {
        "silent-peer": "A peer that stops answering costs timeouts only; when it resumes, "
        "everything arrives.",
        "dead-peer": "The death of a peer fails its pending operations (PEER_LOST, naming it) and "
        "later ones, and no other peer's.",
        "close-dead-peer": "Closing after the death of a peer ends within its limit.",
        "churn": "Messages of mixed kinds and sizes from several threads arrive intact under "
        "garbage collection and memory churn.",
    },
    "The transport's own facts": {
        "native-post": "`post_may_block = never`: posting returns before the peer posts.",
        "native-order": "`order = per_tag`: outstanding messages of one tag arrive first in, "
        "first out.",
        "native-tags": "`tags`: a receive takes the message of its own tag, whatever came before.",
        "native-poll": "`poll = exact`: false while the peer has not posted, true afterwards "
        "without a wait.",
        "native-wait-again": "`wait_repeatable`: a second native wait returns.",
        "native-eager": "`eager_bytes`: a send of that size completes before the peer posts.",
    },
    "Devices and streams": {
        "device-values": "Tensors of the device arrive bit by bit, mixed with host tensors.",
        "stream-order": "After `wait` the current stream is ordered after the operation; the host "
        "is not blocked.",
        "two-streams": "Two threads that wait for one handle on two streams are both ordered.",
        "device-released": "Device memory of sends is given back without a wait.",
    },
}

PROMISES = frozenset(
    {
        "wait-usable",
        "wait-again",
        "timeout-harmless",
        "completed-exact",
        "completed-unwaited",
        "dropped-handle",
        "alive",
        "order",
        "values",
        "dicts",
    }
)
"""Clauses that the handle's promise rests on: a backend that fails one has no level above it."""

CLAUSES = {
    identifier: Clause(identifier, section, text)
    for section, clauses in SECTIONS.items()
    for identifier, text in clauses.items()
}
