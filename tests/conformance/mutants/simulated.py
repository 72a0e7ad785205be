"""Mutants of the simulated transport: it does not do what the facts say."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import vendor
from commlayer_testkit.conformance import Subject
from commlayer_testkit.sim.lane import finish
from commlayer_testkit.sim.mount_device import SimGroup, SimStreamBackend
from commlayer_testkit.sim.operation import Operation, SimWork
from commlayer_testkit.sim.profiles import (
    ADVERSARY,
    GLOO,
    HCCL,
    HCCL_CONNECTED,
    MPI,
    NCCL,
    Profile,
)
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.transport import SimBackend
from torch import Tensor

from commlayer.backend import Backend, Transport
from commlayer.backend import World as BackendWorld
from commlayer.semantics import Order, Poll, PostMayBlock, Semantics, Threads
from commlayer.wire.tags import BROADCAST, TagMap
from mutants.mutant import Mutant
from mutants.relay import (
    ControlNeverMatched,
    HighTagBitsIgnored,
    Relay,
    RelayTransport,
    TagsMerged,
    WrongSource,
)
from mutants.shape import facts


@dataclass(frozen=True)
class Simulated(Subject):
    """Declares the facts of `backend`; the simulator plays `plays`, through `relay`."""

    plays: Semantics | None = None
    relay: type[Relay] = Relay

    def profile(self) -> Profile:
        return replace(super().profile(), semantics=self.plays or self.semantics)

    def simulated(self, rank: Rank) -> Backend:
        made: Backend
        if isinstance(super().simulated(rank), SimStreamBackend):
            made = _Streams(rank, rank.world.profile, self.relay)
        else:
            made = _Host(rank, self.relay)
        made.semantics = self.semantics  # type: ignore[misc]
        return made


class _Host(SimBackend):
    def __init__(self, rank: Rank, relay: type[Relay]) -> None:
        super().__init__(rank.world)
        self._relay = relay

    def open(self, world: BackendWorld, options: Mapping[str, Any]) -> Transport:
        return RelayTransport(super().open(world, options), self._relay, world)


class _Streams(SimStreamBackend):
    def __init__(self, rank: Rank, profile: Profile, relay: type[Relay]) -> None:
        super().__init__(rank, profile)
        self._relay = relay

    def group(self, name: str, *rest: Any) -> Any:
        group = super().group(name, *rest)
        relay = self._relay(group._endpoint, self._rank.index, len(self._rank.world.ranks))
        return SimGroup(relay, group._members)  # type: ignore[arg-type]


def _on(profile: Profile, relay: type[Relay]) -> Any:
    backend = vendor.of_profile(profile).backend
    return lambda: Simulated(backend, relay=relay)


def _playing(profile: Profile, plays: Semantics) -> Any:
    backend = vendor.of_profile(profile).backend
    return lambda: Simulated(backend, plays=plays)


def _is_send(work: SimWork) -> bool:
    return work.operation.kind == "send"


class SendWaitReturnsAtOnce(Relay):
    """For the sends of some sizes."""

    low, high = 0, 1 << 40

    def wait(self, work: SimWork) -> None:
        if not (_is_send(work) and self.low <= work.operation.buffer.nbytes <= self.high):
            self.inner.wait(work)


class LargeSendWaitReturnsAtOnce(SendWaitReturnsAtOnce):
    low, high = 64, 64


class SmallSendWaitReturnsAtOnce(SendWaitReturnsAtOnce):
    low, high = 16, 16


class ReceiveWaitReturnsAtOnce(Relay):
    def wait(self, work: SimWork) -> None:
        if _is_send(work):
            self.inner.wait(work)


class SendWaitReturnsAtMatch(Relay):
    """The peer has posted, and the source has not been read: what it holds is let go of."""

    def wait(self, work: SimWork) -> None:
        operation = work.operation
        if _is_send(work):
            self.inner.world.block(lambda: operation.matched, "waits for the match of", operation)
        else:
            self.inner.wait(work)


class ReleasedOneStepEarly(Relay):
    """The wait of a send returns when the send before it is complete."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._before: dict[Operation, SimWork | None] = {}
        self._last: dict[tuple[int, int], SimWork] = {}

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        self._before[work.operation] = self._last.get((dst, tag))
        self._last[dst, tag] = work
        return work

    def wait(self, work: SimWork) -> None:
        if not _is_send(work):
            self.inner.wait(work)
            return
        before = self._before.pop(work.operation)
        if before is not None:
            self.inner.world.block(before.operation.done, "waits for", before.operation)


class NeverReturns(Relay):
    def wait(self, work: SimWork) -> None:
        operation = work.operation
        self.inner.wait(work)
        if _is_send(work):
            self.inner.world.block(lambda: False, "waits for ever for", operation)


class WaitsOnceTooOften(Relay):
    """It waits twice for each work inside, which the transport does not bear."""

    def wait(self, work: SimWork) -> None:
        self.inner.wait(work)
        self.inner.wait(work)


class LastSendHeldBack(Relay):
    """A send completes when the next one to the same peer is posted."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._last: dict[int, Operation] = {}

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        self._last[dst] = work.operation
        self.inner.world.version += 1
        return work

    def wait(self, work: SimWork) -> None:
        operation = work.operation
        if _is_send(work):
            self.inner.world.block(
                lambda: self._last[operation.peer] is not operation, "is held back", operation
            )
        self.inner.wait(work)


class _Expires(Relay):
    """An operation that is pending for `limit` seconds takes its group with it."""

    limit = 0.0

    def wait(self, work: SimWork) -> None:
        work.wait(self.limit)


class ExpiresAfterSeconds(_Expires):
    limit = 1.5


class ExpiresWithinAnHour(_Expires):
    limit = 1800.0


class ExpiresInTransfer(Relay):
    """A transfer that has begun must end within half a second."""

    def wait(self, work: SimWork) -> None:
        operation = work.operation
        self.inner.world.block(
            lambda: operation.matched or operation.done(), "waits for the match of", operation
        )
        work.wait(0.5)


class UnreadSendCompletes(Relay):
    """A send that nobody takes for half a second is let go of, and nothing has read it."""

    def wait(self, work: SimWork) -> None:
        operation, world = work.operation, self.inner.world
        if _is_send(work) and not world.block(operation.done, "waits for", operation, 0.5):
            finish(operation)
        else:
            self.inner.wait(work)


class _OvertakesAbove(Relay):
    """With more than `above` sends waiting for their match, the last two change places."""

    above = 0
    tags: Container[int] = range(1 << 30)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        operation = work.operation
        lane = self.inner.network.lane(self.inner.name, self.rank, dst, tag)
        sends: deque[Operation] = lane.sends
        if tag in self.tags and len(sends) > max(self.above, 1) and sends[-1] is operation:
            sends[-1], sends[-2] = sends[-2], sends[-1]
        return work


class OvertakesAboveTwo(_OvertakesAbove):
    above = 2


class OvertakesAboveFour(_OvertakesAbove):
    above = 4


class OvertakesInBroadcasts(_OvertakesAbove):
    above = 1
    tags = (TagMap(()).native("broadcast", BROADCAST),)


class ShortMessageNotEnough(Relay):
    """A receive is complete only once its whole buffer is full."""

    def wait(self, work: SimWork) -> None:
        operation = work.operation
        self.inner.wait(work)
        partner = operation.partner
        if not _is_send(work) and partner.buffer.nbytes < operation.buffer.nbytes:
            self.inner.world.block(lambda: False, "waits for more bytes of", operation)


class PollAlternates(Relay):
    """Every second answer of the poll is yes."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._asked: dict[Operation, int] = {}

    def poll(self, work: SimWork) -> bool:
        said = super().poll(work)
        asked = self._asked[work.operation] = self._asked.get(work.operation, 0) + 1
        return said or asked % 2 == 0

    def wait(self, work: SimWork) -> None:
        pass


class PollIsAlwaysYes(Relay):
    def poll(self, work: SimWork) -> bool:
        return True

    def wait(self, work: SimWork) -> None:
        pass


class ErrorsSwallowed(Relay):
    """An expired operation is reported as complete."""

    def wait(self, work: SimWork) -> None:
        try:
            work.wait(1.5)
        except RuntimeError:
            pass


class StreamNotOrdered(Relay):
    """The native wait orders no stream."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return _Unordered(super().isend(tensor, dst, tag))

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return _Unordered(super().irecv(tensor, src, tag))


class OnlyReceivesOrdered(StreamNotOrdered):
    """The native wait of a send orders no stream."""

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return Relay.irecv(self, tensor, src, tag)


class LargeNotOrdered(Relay):
    """The native wait of a send of 64 bytes orders no stream."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        return _Unordered(work) if tensor.numel() == 64 else work


class DefaultStreamOrdered(Relay):
    """The native wait orders the default stream, whichever is current."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return _OrdersDefault(super().isend(tensor, dst, tag))

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return _OrdersDefault(super().irecv(tensor, src, tag))


class _Unordered:
    def __init__(self, inner: SimWork) -> None:
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def exception(self) -> Any:
        return self.inner.exception()


class _OrdersDefault(_Unordered):
    def wait(self, timeout: Any = None) -> bool:
        device = self.inner.operation.endpoint.rank_object.device
        self.inner._order(device.default_stream)
        return True


MUTANTS = (
    Mutant("posts-block", "declares `post_may_block` never, and each send waits for the peer",
           _playing(GLOO, facts(GLOO.semantics, post_may_block=PostMayBlock.ALWAYS)),
           ("L1-post-returns",), "deadlock"),
    Mutant("device-posts-block", "declares `post_may_block` never on a device, and sends block",
           _playing(HCCL_CONNECTED,
                    facts(HCCL_CONNECTED.semantics, post_may_block=PostMayBlock.ALWAYS)),
           ("L1-post-returns",), "deadlock"),
    Mutant("wait-early", "the wait of a send returns at once",
           _on(ADVERSARY, SendWaitReturnsAtOnce), ("L1-wait-usable",),
           "overwritten|use_after_free"),
    Mutant("wait-early-small", "the wait of a send of 16 bytes returns at once",
           _on(ADVERSARY, SmallSendWaitReturnsAtOnce), ("L1-copy-on-post",),
           "overwritten|use_after_free"),
    Mutant("receive-wait-early", "the wait of a receive returns at once",
           _on(GLOO, ReceiveWaitReturnsAtOnce), ("L1-wait-usable",), "error"),
    Mutant("wait-never", "the wait of a complete send does not return",
           _on(GLOO, NeverReturns), ("L1-drain",), "deadlock"),
    Mutant("wait-twice", "a work is waited twice, and the second wait closes the group",
           _on(GLOO, WaitsOnceTooOften), ("L1-wait-again",), "deadlock|error"),
    Mutant("single-threaded", "declares any thread, and bears one at a time",
           _playing(GLOO, msgspec.structs.replace(GLOO.semantics, threads=Threads.SERIALIZED)),
           ("L1-wait-threads",), "misuse"),
    Mutant("timeout-poisons", "an operation that is pending for 1.5 s closes its group",
           _on(GLOO, ExpiresAfterSeconds), ("L1-timeout-harmless",), "timed out|closed"),
    Mutant("timeout-in-transfer", "half a second after its match an operation closes its group",
           _on(GLOO, ExpiresInTransfer), ("L1-timeout-transfer",), "timed out|closed"),
    Mutant("timeout-when-idle", "an operation that is pending for half an hour closes its group",
           _on(GLOO, ExpiresWithinAnHour), ("L1-idle",), "timed out|closed"),
    Mutant("error-swallowed", "an operation that failed is reported as complete",
           _on(GLOO, ErrorsSwallowed), ("L1-timeout-harmless",), "error"),
    Mutant("poll-early", "declares `poll` exact, and it may be early",
           _playing(MPI, facts(MPI.semantics, poll=Poll.MAY_BE_EARLY)),
           ("L1-completed-exact",), "overwritten|error|deadlock"),
    Mutant("poll-late", "declares `poll` exact, and it says no until somebody waits",
           _playing(MPI, facts(MPI.semantics, poll=Poll.NEVER_BEFORE_WAIT)),
           ("L1-released",), "deadlock"),
    Mutant("poll-alternates", "every second answer of the poll is yes",
           _on(MPI, PollAlternates), ("L1-completed-exact",), "error|use_after_free|overwritten"),
    Mutant("poll-always-yes", "the poll says yes at once",
           _on(MPI, PollIsAlwaysYes), ("L1-completed-exact",), "error|use_after_free|overwritten"),
    Mutant("let-go-at-match", "the message is lost, or read after its free, where the work is "
           "dropped between its match and its read",
           _on(ADVERSARY, SendWaitReturnsAtMatch), ("L1-dropped-handle",), "use_after_free"),
    Mutant("dropped-unmatched", "the message is lost where its work is dropped before the match",
           _on(GLOO, SendWaitReturnsAtOnce), ("L1-dropped-handle",), "lost_message|deadlock"),
    Mutant("released-one-step-early", "a wait returns when the send before is complete",
           _on(ADVERSARY, ReleasedOneStepEarly), ("L1-alive",), "use_after_free"),
    Mutant("large-not-kept", "the wait of a send of 64 bytes returns before its read",
           _on(ADVERSARY, LargeSendWaitReturnsAtOnce), ("L1-alive", "L1-completed-exact"),
           "use_after_free|overwritten"),
    Mutant("last-send-held-back", "a send completes when the next one is posted",
           _on(GLOO, LastSendHeldBack), ("L1-bounded",), "1 sends and"),
    Mutant("overtakes-above-two", "with more than two in flight the last two change places",
           _on(GLOO, OvertakesAboveTwo), ("L1-unexpected",), "was expected|error"),
    Mutant("overtakes-above-four", "with more than four in flight the last two change places",
           _on(GLOO, OvertakesAboveFour), ("L1-order",), "was expected|error|abort"),
    Mutant("unordered", "declares `order` per tag, and messages overtake each other",
           _playing(GLOO, facts(GLOO.semantics, order=Order.UNORDERED)), ("L1-order",),
           "error|abort"),
    Mutant("tags-merged", "tags that differ in their lowest bits are one",
           _on(GLOO, TagsMerged), ("L1-tags-independent",), "error|deadlock|abort"),
    Mutant("high-tag-bits-ignored", "tags are cut to 18 bits",
           _on(GLOO, HighTagBitsIgnored), ("L1-channels-independent",), "error|deadlock|abort"),
    Mutant("wrong-source", "among three ranks a receive takes the message of another",
           _on(GLOO, WrongSource), ("L1-peers-independent",), "error|deadlock|abort"),
    Mutant("overtakes-in-broadcasts", "headers of broadcasts overtake each other",
           _on(GLOO, OvertakesInBroadcasts), ("L1-broadcast",), "error|abort"),
    Mutant("short-not-enough", "a message shorter than the buffer does not complete the receive",
           _on(GLOO, ShortMessageNotEnough), ("L1-size-mismatch",), "deadlock"),
    Mutant("unread-send-completes", "a send that nobody takes for half a second is let go of",
           _on(GLOO, UnreadSendCompletes), ("L1-drain",), "lost_message|use_after_free"),
    Mutant("control-never-matched", "messages of one tag never arrive",
           _on(GLOO, ControlNeverMatched), ("L1-close",), "no answer|deadlock"),
    Mutant("no-stream-ordered", "the native wait orders no stream",
           _on(NCCL, StreamNotOrdered), ("L1-wait-usable",),
           "early_read|overwritten|use_after_free|error"),
    Mutant("sends-not-ordered", "the native wait of a device send orders no stream",
           _on(NCCL, OnlyReceivesOrdered), ("L1-wait-usable",), "overwritten|use_after_free"),
    Mutant("large-not-ordered", "the native wait of a device send of 64 bytes orders no stream",
           _on(HCCL_CONNECTED, LargeNotOrdered), ("L1-wait-usable",),
           "overwritten|use_after_free"),
    Mutant("side-stream-not-ordered", "the native wait orders the default stream only",
           _on(HCCL, DefaultStreamOrdered), ("L1-wait-usable",), "use_after_free|early_read|error"),
)  # fmt: skip
