"""What a transport's works mean, declared as data.

A plugin states one `Semantics` per backend: a set of facts for point-to-point
operations, one for collectives, and what they have in common.  The core, the
simulator and the conformance kit all read this one value; nothing else in the
core knows one transport from another.

Every fact defaults to its weakest value, so that a short table is already safe
and a plugin claims only what it can prove.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta


class Fact(str, Enum):
    """One of the answers to a question about a transport; `description` says what it means."""

    description: str

    def __new__(cls, value: str, description: str) -> Fact:
        member = str.__new__(cls, value)
        member._value_ = value
        member.description = description
        return member


class Poll(Fact):
    """What the transport's own completion query tells without a wait."""

    BLOCKS = "blocks", "It waits inside, or nothing is known of it: it is never called."
    MAY_BE_EARLY = (
        "may_be_early",
        "It may say yes before the source may be overwritten or the result used.",
    )
    NEVER_BEFORE_WAIT = "never_before_wait", "It says no until somebody waits."
    EXACT = "exact", "It says yes if and only if the operation is complete."


class WaitBlocks(Fact):
    """Whom the native wait holds up."""

    HOST = "host", "The calling thread, until the operation is complete."
    STREAM = "stream", "The calling thread's current device stream; the host goes on."


class NativeTimeout(Fact):
    """What an expired native ``wait(timeout)`` does."""

    DESTRUCTIVE = "destructive", "It closes or aborts more than the one operation."
    IGNORED = "ignored", "It has no effect: the wait goes on."
    SAFE = "safe", "It raises and changes nothing."


class DroppedWork(Fact):
    """What becomes of an operation whose native work object is dropped."""

    UNSAFE = "unsafe", "The transport may read or write memory that has been freed."
    LOSES_MESSAGE = (
        "loses_message",
        "The message is not delivered, and its pair may be unusable afterwards.",
    )
    CONTINUES = "continues", "Nothing: the transport keeps what it needs."


class Order(Fact):
    """In which order operations between one pair of ranks match and complete."""

    UNORDERED = "unordered", "Several outstanding messages of one pair may overtake each other."
    IN_ORDER_STREAM = "in_order_stream", "All operations of one communicator run one after another."
    PER_TAG = "per_tag", "First in, first out per peer and tag; tags match independently."


class Progress(Fact):
    """What drives an operation to completion."""

    ONLY_IN_CALLS = "only_in_calls", "Nothing moves unless somebody calls into the transport."
    AUTONOMOUS = "autonomous", "The transport's own threads or hardware."


class Threads(Fact):
    """From which threads the transport may be called (the MPI levels)."""

    FUNNELED = "funneled", "Only from the thread that opened it."
    SERIALIZED = "serialized", "From any thread, one call at a time on each communicator."
    MULTIPLE = "multiple", "From several threads at once."


class Completion(Fact):
    """What the completion of a send says (libfabric's completion levels)."""

    LOCAL = "local", "The source may be reused."
    MATCHED = "matched", "The peer has posted the receive."
    DELIVERED = "delivered", "The peer has the bytes."


class SizeMismatch(Fact):
    """What a receive of another size than the message does."""

    ABORTS = "aborts", "A process may die."
    SILENT = "silent", "Nothing is said; some bytes are missing or untouched."
    ERROR = "error", "The receive raises and the process lives."


class SourceLifetime(Fact):
    """What keeps a source buffer alive for the transport."""

    REFERENCE = "reference", "A reference to tensor and work, held until completion."
    EVENT = "event", "A reference held until a device event that follows the operation."
    RECORD_STREAM = "record_stream", "The transport records its stream with the caching allocator."


class PeerLoss(Fact):
    """How a pending operation learns that its peer is gone."""

    SILENT = "silent", "Not at all."
    NEXT_POST_ONLY = "next_post_only", "It may hang; only the next post to that peer raises."
    RAISES = "raises", "Its wait raises soon."


class PostMayBlock(Fact):
    """Whether posting may hold up the calling thread until the peer comes."""

    ALWAYS = "always", "Any send may."
    FIRST_USE = "first_use", "The first operation of a pair of ranks may, on each communicator."
    NEVER = "never", "No post does."


class Capture(Fact):
    """Whether an operation may be posted while a device graph is captured."""

    REFUSED = "refused", "It may not: posting raises before anything leaves the rank."
    ALLOWED = "allowed", "It may."


class OperationSemantics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The facts of one kind of operation (point-to-point, or collective).

    Every field defaults to the weakest value.
    """

    poll: Poll = Poll.BLOCKS
    wait_blocks: WaitBlocks = WaitBlocks.HOST
    wait_repeatable: Annotated[
        bool,
        Meta(description="Whether a second native wait returns at once; if not, it runs once."),
    ] = False
    timeout: NativeTimeout = NativeTimeout.DESTRUCTIVE
    dropped_work: DroppedWork = DroppedWork.UNSAFE
    eager_bytes: Annotated[
        int,
        Meta(
            description="Bytes of the largest message sent before its receive is posted (0: none)."
        ),
    ] = 0
    post_may_block: PostMayBlock = PostMayBlock.ALWAYS
    order: Order = Order.UNORDERED
    max_outstanding_per_pair: Annotated[
        int,
        Meta(description="Operations in flight for each pair, direction and tag (0: no limit)."),
    ] = 1
    completion: Completion = Completion.LOCAL
    size_mismatch: SizeMismatch = SizeMismatch.ABORTS
    source_lifetime: SourceLifetime = SourceLifetime.REFERENCE
    peer_loss: PeerLoss = PeerLoss.SILENT
    errors_polled: Annotated[
        bool, Meta(description="Whether the completion query raises when the operation failed.")
    ] = False
    contiguous_only: Annotated[bool, Meta(description="Whether tensors must be contiguous.")] = True


class Semantics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All declared facts of one backend."""

    p2p: OperationSemantics = OperationSemantics()
    collective: OperationSemantics = OperationSemantics()
    progress: Progress = Progress.ONLY_IN_CALLS
    threads: Threads = Threads.FUNNELED
    tags: Annotated[
        bool, Meta(description="Whether operations carry a tag that matches apart from other tags.")
    ] = False
    devices: Annotated[
        tuple[str, ...],
        Meta(description="The torch device types whose memory it reads and writes."),
    ] = ("cpu",)
    capture: Capture = Capture.REFUSED

    def facts(self) -> dict[str, Any]:
        """All facts as plain values, for printing, comparing and the wire."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]


def meaning(owner: type[OperationSemantics] | type[Semantics], fact: str) -> str:
    """What the fact named `fact` of `owner` is about."""
    hint = get_type_hints(owner, include_extras=True)[fact]
    if isinstance(hint, type):
        return " ".join((hint.__doc__ or "").split())
    return next(m.description for m in hint.__metadata__ if isinstance(m, Meta)) or ""
