"""Transports as data: what is known of them, in the vocabulary of `commlayer.semantics`.

A `Profile` is a `Semantics` value, the same type that plugins declare, and the
few numbers that are measured behaviour but no promise.  Gloo's facts are those of its
plugin, which probes measure.  Sources of the others: MPI and oneCCL on the CPU were
measured with two processes on loopback; NCCL, XCCL and HCCL were read in the sources
of their process groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from commlayer.errors import CommError, ErrorKind
from commlayer.registry import default_registry
from commlayer.semantics import (
    Completion,
    DroppedWork,
    NativeTimeout,
    OperationSemantics,
    Order,
    Poll,
    PostMayBlock,
    Progress,
    Semantics,
    SizeMismatch,
    SourceLifetime,
    Threads,
    WaitBlocks,
)


@dataclass(frozen=True)
class Profile:
    """One transport as the simulator plays it.

    `watchdog` is the longest an operation may stay on a device, in seconds;
    `group_timeout` how long a wait that cannot succeed blocks.  With `makes_one_at_a_time` a
    communicator is made in a call that finds the other rank in the store, blocks until that
    makes it, too, and keeps the process from making another meanwhile.  `pool` is how many
    streams the device hands out, in turn (0: as many as are asked for).
    """

    name: str
    semantics: Semantics
    note: str
    watchdog: float | None = None
    group_timeout: float = 1800.0
    makes_one_at_a_time: bool = False
    pool: int = 0


GLOO = Profile(
    "gloo",
    default_registry().load("gloo").backend.semantics,
    "c10d gloo as its plugin declares it: rendezvous at every size, the poll says no until waited",
)
GLOO_EARLY_POLL = Profile(
    "gloo_early_poll",
    msgspec.structs.replace(
        GLOO.semantics, p2p=msgspec.structs.replace(GLOO.semantics.p2p, poll=Poll.MAY_BE_EARLY)
    ),
    "c10d gloo as reported elsewhere: the poll may say yes too early",
)

_STREAM = OperationSemantics(
    poll=Poll.EXACT,
    wait_blocks=WaitBlocks.STREAM,
    wait_repeatable=True,
    dropped_work=DroppedWork.CONTINUES,
    order=Order.IN_ORDER_STREAM,
    max_outstanding_per_pair=0,
)
NCCL = Profile(
    "nccl",
    Semantics(
        p2p=msgspec.structs.replace(
            _STREAM,
            post_may_block=PostMayBlock.FIRST_USE,
            source_lifetime=SourceLifetime.RECORD_STREAM,
        ),
        collective=_STREAM,
        progress=Progress.AUTONOMOUS,
        threads=Threads.SERIALIZED,
        devices=("cuda",),
    ),
    "ProcessGroupNCCL as read: the first operation of a pair connects it and blocks the host",
)
XCCL = Profile(
    "xccl",
    Semantics(
        p2p=msgspec.structs.replace(
            _STREAM,
            timeout=NativeTimeout.SAFE,
            post_may_block=PostMayBlock.ALWAYS,
            source_lifetime=SourceLifetime.RECORD_STREAM,
        ),
        collective=msgspec.structs.replace(
            _STREAM, timeout=NativeTimeout.SAFE, dropped_work=DroppedWork.UNSAFE
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.SERIALIZED,
        devices=("xpu",),
    ),
    "ProcessGroupXCCL as read: a send keeps the host busy until the peer posts its receive",
)
CCL_BINDINGS = Profile(
    "ccl_bindings",
    Semantics(progress=Progress.AUTONOMOUS, threads=Threads.SERIALIZED, devices=("xpu",)),
    "oneccl_bindings_for_pytorch: the poll blocks as measured, the rest at its weakest",
)
HCCL = Profile(
    "hccl",
    Semantics(
        p2p=msgspec.structs.replace(
            _STREAM,
            timeout=NativeTimeout.IGNORED,
            post_may_block=PostMayBlock.FIRST_USE,
            completion=Completion.MATCHED,
            source_lifetime=SourceLifetime.EVENT,
        ),
        collective=msgspec.structs.replace(
            _STREAM, timeout=NativeTimeout.IGNORED, dropped_work=DroppedWork.UNSAFE
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.SERIALIZED,
        devices=("npu",),
    ),
    "HCCL as read: one serialized stream a communicator, and a device watchdog",
    watchdog=1836.0,  # HCCL_EXEC_TIMEOUT, where it is not set
)
HCCL_CONNECTED = Profile(
    "hccl_connected",
    msgspec.structs.replace(
        HCCL.semantics,
        p2p=msgspec.structs.replace(HCCL.semantics.p2p, post_may_block=PostMayBlock.NEVER),
    ),
    "HCCL on communicators that are made: a send holds its stream, and never the host",
    watchdog=HCCL.watchdog,
)
ONE_CREATION = Profile(
    "one_creation",
    NCCL.semantics,
    "as nccl, on a library that makes one communicator at a time, and a store between the ranks",
    makes_one_at_a_time=True,
)
POOLED = Profile(
    "pooled",
    HCCL_CONNECTED.semantics,
    "as hccl_connected, on a device that hands out the same three streams in turn",
    pool=3,
)
MPI = Profile(
    "mpi",
    Semantics(
        p2p=OperationSemantics(
            poll=Poll.EXACT,
            wait_repeatable=True,
            timeout=NativeTimeout.IGNORED,
            dropped_work=DroppedWork.UNSAFE,
            eager_bytes=4096,
            post_may_block=PostMayBlock.NEVER,
            order=Order.PER_TAG,
            max_outstanding_per_pair=0,
            size_mismatch=SizeMismatch.ERROR,
        ),
        collective=OperationSemantics(
            poll=Poll.EXACT,
            wait_repeatable=True,
            timeout=NativeTimeout.IGNORED,
            post_may_block=PostMayBlock.NEVER,
            order=Order.PER_TAG,
            max_outstanding_per_pair=0,
            size_mismatch=SizeMismatch.ERROR,
        ),
        progress=Progress.ONLY_IN_CALLS,
        threads=Threads.SERIALIZED,
        tags=True,
    ),
    "MPICH as measured: 4 KiB are eager, progress only inside calls, a dropped request is unsafe",
)
MPI_RENDEZVOUS = Profile(
    "mpi_rendezvous",
    msgspec.structs.replace(
        MPI.semantics, p2p=msgspec.structs.replace(MPI.semantics.p2p, eager_bytes=0)
    ),
    "any MPI library, by the standard: as mpi, and no send completes before its receive",
)
ONECCL_CPU = Profile(
    "oneccl_cpu",
    Semantics(
        p2p=OperationSemantics(
            poll=Poll.EXACT,
            wait_repeatable=True,
            eager_bytes=4096,
            post_may_block=PostMayBlock.NEVER,
            order=Order.UNORDERED,
            max_outstanding_per_pair=1,
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.MULTIPLE,
    ),
    "oneCCL's own library on the CPU as measured: two sends of one pair may overtake each other",
)
ADVERSARY = Profile(
    "adversary",
    Semantics(
        p2p=OperationSemantics(
            poll=Poll.MAY_BE_EARLY, post_may_block=PostMayBlock.NEVER, order=Order.PER_TAG,
            max_outstanding_per_pair=0,
        ),
        progress=Progress.AUTONOMOUS,
        threads=Threads.MULTIPLE,
        tags=True,
    ),
    "the weakest answers to poll, wait, timeout and drop; threads, tags and progress as gloo's",
)  # fmt: skip
UNORDERED = Profile(
    "unordered",
    msgspec.structs.replace(
        ADVERSARY.semantics,
        p2p=msgspec.structs.replace(ADVERSARY.semantics.p2p, order=Order.UNORDERED),
    ),
    "adversary, and outstanding sends of one pair may overtake each other",
)
ADVERSARY_SERIAL = Profile(
    "adversary_serial",
    Semantics(
        p2p=OperationSemantics(),
        progress=Progress.AUTONOMOUS,
        threads=Threads.MULTIPLE,
        tags=True,
    ),
    "the weakest facts under which a waiter can drive: no order within a lane, a post may block",
)
ADVERSARY_POLLED = Profile(
    "adversary_polled",
    Semantics(
        p2p=OperationSemantics(poll=Poll.EXACT, post_may_block=PostMayBlock.NEVER),
        tags=True,
    ),
    "the weakest facts under which polling can drive: one thread, progress only in its calls",
)
ADVERSARY_WEAKEST = Profile(
    "adversary_weakest",
    Semantics(),
    "every fact at its default, which is its weakest value; a post may block",
)

PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        GLOO, GLOO_EARLY_POLL, NCCL, XCCL, CCL_BINDINGS, HCCL, HCCL_CONNECTED, ONE_CREATION,
        POOLED, MPI,
        MPI_RENDEZVOUS, ONECCL_CPU, ADVERSARY, UNORDERED, ADVERSARY_SERIAL, ADVERSARY_POLLED,
        ADVERSARY_WEAKEST,
    )
}  # fmt: skip


def profile(name: str) -> Profile:
    """The profile `name`; raises `CommError` (CONFIG) for an unknown one."""
    try:
        return PROFILES[name]
    except KeyError:
        raise CommError(
            ErrorKind.CONFIG, f"profile {name!r}", "there is no such profile",
            f"Known profiles: {', '.join(PROFILES)}",
        ) from None  # fmt: skip
