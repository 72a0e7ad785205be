"""Mutants of the real transport: gloo between processes, behind an endpoint that lies."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from commlayer_gloo import GlooBackend
from commlayer_testkit.conformance import Subject
from torch import Tensor

from commlayer.backend import Endpoint, Transport, World
from commlayer.semantics import Completion, DroppedWork, Poll, Semantics
from commlayer.wire.tags import BROADCAST, TagMap
from mutants.mutant import HANGS, PEER_LOST, SPOILT, Mutant
from mutants.relay import (
    ControlNeverMatched,
    Relay,
    RelayTransport,
    TagsMerged,
    WrongSource,
)
from mutants.shape import Gloo, facts

KIB, MIB = 1 << 10, 1 << 20
_IMPORTED_IN = os.getpid()


class Lying(Gloo):
    """Gloo behind a relay."""

    def __init__(
        self, relay: type[Relay] = Relay, semantics: Semantics = GlooBackend.semantics
    ) -> None:
        super().__init__(semantics)
        self.relay = relay

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        return RelayTransport(super().open(world, options), self.relay, world)


class _Tracking(Relay):
    """Knows which works are sends, of how many bytes, to whom and on which tag."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self.sends: list[tuple[Any, int, int, int]] = []

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        self.sends.append((work, tensor.numel(), dst, tag))
        return work

    def nbytes(self, work: Any) -> int:
        """Bytes of a send, -1 of a receive."""
        return next((nbytes for send, nbytes, _, _ in self.sends if send is work), -1)


class SendWaitReturnsAtOnce(_Tracking):
    """For the sends of some sizes."""

    low, high = 1, 1 << 40

    def wait(self, work: Any) -> None:
        if not self.low <= self.nbytes(work) <= self.high:
            super().wait(work)


class HugeSendWaitReturnsAtOnce(SendWaitReturnsAtOnce):
    low = MIB


class LargeSendWaitReturnsAtOnce(SendWaitReturnsAtOnce):
    low, high = 16 * KIB, MIB - 1


class ReadsAfterFree(SendWaitReturnsAtOnce):
    """As an address would be read: what it finds after a free is what is there then.

    Bytes are taken from a copy that is spoilt when the source dies.
    """

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        copy = tensor.clone()
        weakref.finalize(tensor.untyped_storage(), copy.fill_, 0xDB)
        return super().isend(copy, dst, tag)


class SmallReadAfterFree(ReadsAfterFree):
    high = 16 * KIB


class LargeReadAfterFree(ReadsAfterFree):
    low = 16 * KIB


class ReceiveWaitReturnsAtOnce(Relay):
    """For receives of more than 16 KiB; so that it shows, their bytes come 0.2 s later."""

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        if tensor.numel() <= 16 * KIB:
            return super().irecv(tensor, src, tag)
        late = threading.Timer(0.2, self._receive, (tensor, src, tag))
        late.daemon = True
        late.start()
        return late

    def _receive(self, tensor: Tensor, src: int, tag: int) -> None:
        try:
            self.inner.wait(self.inner.irecv(tensor, src, tag))
        except RuntimeError:
            pass

    def wait(self, work: Any) -> None:
        if not isinstance(work, threading.Timer):
            super().wait(work)


class LargeSendWaitNeverReturns(_Tracking):
    def wait(self, work: Any) -> None:
        super().wait(work)
        if self.nbytes(work) > 16 * KIB:
            threading.Event().wait()


class WaitsTwiceInside(Relay):
    """The second wait closes every pair of the group after a while."""

    def wait(self, work: Any) -> None:
        super().wait(work)
        work.wait(timedelta(milliseconds=100))


class LargePostWaits(Relay):
    """Posting a send of more than 16 KiB waits for the peer."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        work = super().isend(tensor, dst, tag)
        if tensor.numel() <= 16 * KIB:
            return work
        self.inner.wait(work)
        return None

    def wait(self, work: Any) -> None:
        if work is not None:
            super().wait(work)


class OnePeerAtATime(_Tracking):
    """A send waits for those to other peers."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        for work, _, peer, _ in self.sends:
            while peer != dst and id(work) not in self._done:
                time.sleep(0.001)
        return super().isend(tensor, dst, tag)

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._done: set[int] = set()

    def wait(self, work: Any) -> None:
        super().wait(work)
        self._done.add(id(work))


class OneThreadAtATime(Relay):
    """A wait keeps every other call out."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._lock = threading.Lock()

    def wait(self, work: Any) -> None:
        with self._lock:
            super().wait(work)


class UnmatchedSendPoisons(_Tracking):
    """A send that is pending for 0.1 s closes every pair of its group."""

    def wait(self, work: Any) -> None:
        if self.nbytes(work) >= 0:
            work.wait(timedelta(milliseconds=100))
        else:
            super().wait(work)


class PendingSendReportedComplete(_Tracking):
    """A send that is pending for 0.3 s is reported as complete; it goes on."""

    def wait(self, work: Any) -> None:
        if self.nbytes(work) < 0:
            super().wait(work)
            return
        thread = threading.Thread(target=self._finish, args=(work,), daemon=True)
        thread.start()
        thread.join(0.3)

    def _finish(self, work: Any) -> None:
        try:
            self.inner.wait(work)
        except RuntimeError:
            pass


class MovesInCallsOnly(Relay):
    """Nothing is complete until the next operation is posted."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._posts = 0
        self._posted = threading.Condition()

    def _count(self) -> None:
        with self._posted:
            self._posts += 1
            self._posted.notify_all()

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        self._count()
        return super().isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        self._count()
        return super().irecv(tensor, src, tag)

    def wait(self, work: Any) -> None:
        super().wait(work)
        with self._posted:
            posts = self._posts
            self._posted.wait_for(lambda: self._posts > posts)


class LastSendHeldBack(_Tracking):
    """A send completes when the next one to the same peer is posted."""

    def wait(self, work: Any) -> None:
        super().wait(work)
        peer = next((dst for send, _, dst, _ in self.sends if send is work), -1)
        while peer >= 0 and [send for send, _, dst, _ in self.sends if dst == peer][-1] is work:
            time.sleep(0.001)


class Starves(Relay):
    """It needs the interpreter every few milliseconds; an operation fails where it waits longer."""

    def wait(self, work: Any) -> None:
        late = 0
        for _ in range(10):
            began = time.monotonic()
            time.sleep(0.0001)
            late += time.monotonic() - began > 0.004
        if late >= 8:
            raise RuntimeError("the heartbeat was lost")
        super().wait(work)


class _Overtakes(_Tracking):
    """With more than `above` sends of a tag pending, the next one is posted before this one."""

    above = 0

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._pending: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._held: dict[tuple[int, int], _Late] = {}
        self._lock = threading.Lock()

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        key = dst, tag
        with self._lock:
            self._pending[key] += 1
            if key not in self._held and self._pending[key] > self.above:
                late = self._held[key] = _Late(key, tensor)
                return late
            late = _Late(key, tensor)
            late.work = self.inner.isend(tensor, dst, tag)
            self._release(key)
            return late

    def _release(self, key: tuple[int, int]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held.work = self.inner.isend(held.tensor, *key)

    def wait(self, work: Any) -> None:
        if not isinstance(work, _Late):
            super().wait(work)
            return
        with self._lock:
            if self._held.get(work.key) is work:
                self._release(work.key)
        super().wait(work.work)
        with self._lock:
            self._pending[work.key] -= 1


class _Late:
    """A send that may not have been posted yet."""

    def __init__(self, key: tuple[int, int], tensor: Tensor) -> None:
        self.key = key
        self.tensor = tensor
        self.work: Any = None


class OvertakesAboveTwo(_Overtakes):
    above = 2


class OvertakesAboveFour(_Overtakes):
    above = 4


class QueueOfEight(_Tracking):
    """A send is lost where eight of its tag are pending."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._pending: defaultdict[tuple[int, int], int] = defaultdict(int)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        if self._pending[dst, tag] >= 8:
            return None
        self._pending[dst, tag] += 1
        return super().isend(tensor, dst, tag)

    def wait(self, work: Any) -> None:
        if work is None:
            return
        super().wait(work)
        for send, _, dst, tag in self.sends:
            if send is work:
                self._pending[dst, tag] -= 1


class _Damages(Relay):
    """The last byte of some received messages is another."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._targets: list[tuple[Any, Tensor]] = []

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        work = super().irecv(tensor, src, tag)
        if self.damages(tensor.numel(), tag):
            self._targets.append((work, tensor))
        return work

    def damages(self, nbytes: int, tag: int) -> bool:
        raise NotImplementedError

    def wait(self, work: Any) -> None:
        super().wait(work)
        for received, tensor in self._targets:
            if received is work:
                tensor[-1] ^= 0x55


class DamagesHalfMiB(_Damages):
    def damages(self, nbytes: int, tag: int) -> bool:
        return nbytes == 512 * KIB


class DamagesBroadcasts(_Damages):
    def damages(self, nbytes: int, tag: int) -> bool:
        header = TagMap(()).native("broadcast", BROADCAST)
        return nbytes > 16 * KIB and tag in {TagMap.payload(header, slot) for slot in range(8)}


class DamagesTheTwentieth(_Damages):
    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._large = itertools.count(1)

    def damages(self, nbytes: int, tag: int) -> bool:
        return nbytes == 256 * KIB and next(self._large) == 20


class LongHeadersDamaged(Relay):
    """The last byte of messages of 192 to 4095 bytes is another."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        if 192 <= tensor.numel() < 4096:
            tensor = tensor.clone()
            tensor[-1] ^= 0x55
        return super().isend(tensor, dst, tag)


class ShortMessageNotEnough(Relay):
    """A receive is complete only once its whole buffer is full."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._targets: list[tuple[Any, Tensor]] = []

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        tensor[-1] = 0xA7
        work = super().irecv(tensor, src, tag)
        self._targets.append((work, tensor))
        return work

    def wait(self, work: Any) -> None:
        super().wait(work)
        target = next((t for received, t in self._targets if received is work), None)
        if target is not None and target[-1] == 0xA7:
            threading.Event().wait()


class ErrorsSwallowed(Relay):
    """A failed operation is reported as complete."""

    def wait(self, work: Any) -> None:
        try:
            super().wait(work)
        except RuntimeError:
            pass


class ErrorsNeverTold(Relay):
    """The wait of a failed operation does not return."""

    def wait(self, work: Any) -> None:
        try:
            super().wait(work)
        except RuntimeError:
            threading.Event().wait()


class ErrorsSpread(Relay):
    """After one failure every operation fails."""

    failure: RuntimeError | None = None

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        if self.failure is not None:
            raise self.failure
        return super().isend(tensor, dst, tag)

    def wait(self, work: Any) -> None:
        try:
            super().wait(work)
        except RuntimeError as error:
            self.failure = error
            raise


class ErrorsEndTheProcess(Relay):
    """A failure is changed into the end of the process."""

    def wait(self, work: Any) -> None:
        try:
            super().wait(work)
        except RuntimeError:
            os._exit(9)


class SourcesKeptForEver(Relay):
    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._kept: list[Tensor] = []

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        self._kept.append(tensor)
        return super().isend(tensor, dst, tag)


class DescriptorsLeak(Relay):
    """One for every fifty messages to a peer."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._sent: defaultdict[int, int] = defaultdict(int)

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        self._sent[dst] += 1
        if self._sent[dst] % 50 == 0:
            os.open(os.devnull, os.O_RDONLY)
        return super().isend(tensor, dst, tag)


class NeedsAFork(Lying):
    """It works where the process was forked from one that had imported it."""

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        if os.getpid() == _IMPORTED_IN:
            raise RuntimeError("nothing was inherited")
        return super().open(world, options)


class OpensOnce(Lying):
    """It cannot be opened again in the same process."""

    opened: ClassVar[bool] = False

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        if type(self).opened:
            raise RuntimeError("already initialised")
        type(self).opened = True
        return super().open(world, options)


class AbortsAtExit(Lying):
    """It brings the process down when that ends."""

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        atexit.register(os.abort)
        return super().open(world, options)


class ExitCodeLost(Lying):
    """It ends the process itself, with an exit code of its own."""

    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        atexit.register(os._exit, 0)
        return super().open(world, options)


class ForkKillsTheChild(Lying):
    def open(self, world: World, options: Mapping[str, Any]) -> Transport:
        os.register_at_fork(after_in_child=lambda: os._exit(3))
        return super().open(world, options)


class Watched:
    """A native work that a thread waits for; complete at once if the source was copied."""

    def __init__(self, inner: Endpoint, work: Any, eager: bool) -> None:
        self.done = threading.Event()
        self.error: RuntimeError | None = None
        if eager:
            self.done.set()
        self.thread = threading.Thread(target=self._finish, args=(inner, work), daemon=True)
        self.thread.start()

    def _finish(self, inner: Endpoint, work: Any) -> None:
        try:
            inner.wait(work)
        except RuntimeError as error:
            self.error = error
        self.done.set()


class Exact(Relay):
    """Honest, and stronger than gloo: an exact poll, repeatable waits, eager below 4 KiB."""

    EAGER = 4 * KIB

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._works: list[Watched] = []

    def _watch(self, work: Any, eager: bool) -> Watched:
        watched = Watched(self.inner, work, eager)
        self._works = [known for known in self._works if known.thread.is_alive()]
        self._works.append(watched)
        return watched

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        eager = tensor.numel() <= self.EAGER
        source = tensor.clone() if eager else tensor
        return self._watch(super().isend(source, dst, tag), eager)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return self._watch(super().irecv(tensor, src, tag), False)

    def wait(self, work: Watched) -> None:
        work.done.wait()
        if work.error is not None:
            raise work.error

    def poll(self, work: Watched) -> bool:
        return work.done.is_set()

    def close(self) -> None:
        for work in self._works:
            work.thread.join(1.0)
        super().close()


EXACT = facts(
    GlooBackend.semantics,
    poll=Poll.EXACT,
    wait_repeatable=True,
    dropped_work=DroppedWork.CONTINUES,
    eager_bytes=Exact.EAGER,
    completion=Completion.LOCAL,
)


class PollIsAlwaysYes(Exact):
    def poll(self, work: Watched) -> bool:
        return True


class PollIsYesAfterWait(Exact):
    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._waited: set[int] = set()

    def wait(self, work: Watched) -> None:
        super().wait(work)
        self._waited.add(id(work))

    def poll(self, work: Watched) -> bool:
        return id(work) in self._waited


class PollAlternates(Exact):
    """Every second answer is wrong, beginning with the first."""

    asked = 0

    def poll(self, work: Watched) -> bool:
        self.asked += 1
        return super().poll(work) != (self.asked % 2 == 1)


class SecondWaitNeverReturns(Exact):
    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(inner, rank, size)
        self._waited: list[Watched] = []

    def wait(self, work: Watched) -> None:
        super().wait(work)
        if any(work is waited for waited in self._waited):
            threading.Event().wait()
        self._waited.append(work)


class SecondWaitRaises(SecondWaitNeverReturns):
    def wait(self, work: Watched) -> None:
        if any(work is waited for waited in self._waited):
            raise RuntimeError("invalid request")
        Exact.wait(self, work)
        self._waited.append(work)


class EagerWithoutACopy(Exact):
    """A small send completes at once, and its source is read later."""

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        eager = tensor.numel() <= self.EAGER
        copy = tensor.clone()
        if eager:
            weakref.finalize(tensor.untyped_storage(), copy.fill_, 0xDB)
        return self._watch(Relay.isend(self, copy, dst, tag), eager)


class LessEager(Exact):
    """Half of what is declared."""

    EAGER = 2 * KIB


def _lie(name: str, breaks: str, relay: type[Relay], *rules: str, says: str = "") -> Mutant:
    return Mutant(name, breaks, lambda: Subject(Lying(relay)), rules, says)


def _strong(name: str, breaks: str, relay: type[Relay], *rules: str, says: str = "") -> Mutant:
    return Mutant(name, breaks, lambda: Subject(Lying(relay, EXACT)), rules, says)


def _backend(name: str, breaks: str, backend: Lying, *rules: str, says: str = "") -> Mutant:
    return Mutant(name, breaks, lambda: Subject(backend), rules, says)


MUTANTS = (
    _lie("p-posts-block", "posting more than 16 KiB waits for the peer", LargePostWaits,
         "L2-post-returns", "L2-native-post", says=HANGS),
    _lie("p-wait-early", "the wait of a send of 16 KiB to 1 MiB returns at once",
         LargeSendWaitReturnsAtOnce, "L2-wait-usable", says="got other bytes"),
    _lie("p-wait-early-any", "the wait of a send returns at once", SendWaitReturnsAtOnce,
         "L2-drain", "L2-bound-raises", "L2-close-in-flight",
         says="too early|has not posted|names no undelivered"),
    _lie("p-wait-early-huge", "the wait of a send of 1 MiB or more returns at once",
         HugeSendWaitReturnsAtOnce, "L2-completed-exact", says="before the peer posted"),
    _lie("p-receive-wait-early", "the wait of a receive above 16 KiB returns at once",
         ReceiveWaitReturnsAtOnce, "L2-wait-usable", says="got other bytes"),
    _lie("p-wait-never", "the wait of a send above 16 KiB does not return",
         LargeSendWaitNeverReturns, "L2-wait-again", says=HANGS),
    _lie("p-wait-twice", "each work is waited twice", WaitsTwiceInside, "L2-reconnect",
         says=PEER_LOST),
    _lie("p-single-threaded", "a wait keeps every other call out", OneThreadAtATime,
         "L2-wait-threads", says=HANGS),
    _lie("p-timeout-poisons", "a send that is pending for 0.1 s closes every pair",
         UnmatchedSendPoisons, "L2-timeout-harmless", "L4-silent-peer",
         says=f"{PEER_LOST}|the peer is stopped"),
    _lie("p-pending-is-complete", "a send that is pending for 0.3 s is reported as complete",
         PendingSendReportedComplete, "L4-silent-peer", "L2-close-in-flight",
         says="the peer is stopped|names no undelivered"),
    _lie("p-moves-in-calls", "declares autonomous progress, and nothing moves outside calls",
         MovesInCallsOnly, "L2-completed-unwaited", says=HANGS),
    _lie("p-last-send-held-back", "a send completes when the next one is posted",
         LastSendHeldBack, "L2-released", says=HANGS),
    _lie("p-small-not-kept", "a small source is read after the wait that let go of it",
         SmallReadAfterFree, "L2-dropped-handle", says=SPOILT),
    _lie("p-large-not-kept", "a large source is read after the wait that let go of it",
         LargeReadAfterFree, "L2-dropped-handle", says="did not arrive whole"),
    _lie("p-starves", "it fails where the interpreter is busy", Starves, "L2-busy-interpreter",
         says="heartbeat was lost"),
    _lie("p-overtakes-above-two", "with more than two of a tag pending two change places",
         OvertakesAboveTwo, "L2-native-order", says="exit code -6|overtook|rank . raised"),
    _lie("p-overtakes-above-four", "with more than four of a tag pending two change places",
         OvertakesAboveFour, "L2-order", says="rank . raised|exit code"),
    _lie("p-tags-merged", "tags that differ in their lowest bits are one", TagsMerged,
         "L2-tags-independent", "L2-native-tags", says="rank . raised|exit code -6|another tag"),
    _lie("p-one-peer-at-a-time", "a send waits for those to other peers", OnePeerAtATime,
         "L2-peers-independent", says=HANGS),
    _lie("p-wrong-source", "among four ranks a receive takes the message of another",
         WrongSource, "L2-peers-independent", says=f"{HANGS}|got other bytes"),
    _lie("p-damages-broadcasts", "large broadcasts are damaged", DamagesBroadcasts,
         "L2-broadcast", says="got another broadcast"),
    _lie("p-damages-values", "the last byte of a message of 512 KiB is another", DamagesHalfMiB,
         "L2-values", says="other bytes arrived"),
    _lie("p-damages-long-headers", "messages of 192 to 4095 bytes are damaged",
         LongHeadersDamaged, "L2-dicts", says="other bytes arrived"),
    _lie("p-short-not-enough", "a message shorter than the buffer does not complete the receive",
         ShortMessageNotEnough, "L2-size-mismatch", says=HANGS),
    _lie("p-queue-of-eight", "a ninth pending send of a tag is lost", QueueOfEight,
         "L2-late-peer", says=f"{HANGS}|was expected"),
    _lie("p-control-never-matched", "messages of one tag never arrive", ControlNeverMatched,
         "L2-close", says=HANGS),
    _backend("p-needs-a-fork", "it works in forked processes only", NeedsAFork(),
             "L2-fresh-interpreters", says="nothing was inherited"),
    _backend("p-opens-once", "it cannot be opened twice in a process", OpensOnce(),
             "L2-reconnect", says="already initialised"),
    _backend("p-aborts-at-exit", "the process aborts when it ends", AbortsAtExit(),
             "L2-exit", says=r"exit codes \[-6, -6\]"),
    _backend("p-exit-code-lost", "the process ends with another exit code", ExitCodeLost(),
             "L2-exit", says=r"exit codes \[0, 0\]"),
    _backend("p-fork-kills-the-child", "a forked child does not live", ForkKillsTheChild(),
             "L2-fork", says=r"exit codes \[3, 3\]"),
    _strong("p-poll-always-yes", "the poll says yes before the peer has posted",
            PollIsAlwaysYes, "L2-native-poll", says="before the peer"),
    _strong("p-poll-late", "the poll says no until somebody waits", PollIsYesAfterWait,
            "L2-native-poll", says=HANGS),
    _strong("p-poll-alternates", "every second answer of the poll is wrong", PollAlternates,
            "L2-native-poll", says="before the peer"),
    _strong("p-second-wait-never", "a second wait does not return", SecondWaitNeverReturns,
            "L2-native-wait-again", says=HANGS),
    _strong("p-second-wait-raises", "a second wait raises", SecondWaitRaises,
            "L2-native-wait-again", says="invalid request"),
    _strong("p-less-eager", "it is eager up to half of what is declared", LessEager,
            "L2-native-eager", says=HANGS),
    _strong("p-eager-without-a-copy", "an eager source is read after its send was complete",
            EagerWithoutACopy, "L2-dropped-handle", says=SPOILT),
    _lie("p-errors-swallowed", "a failed operation is reported as complete", ErrorsSwallowed,
         "L4-dead-peer", says="expected peer_lost|where peer_lost was expected"),
    _lie("p-errors-never-told", "the wait of a failed operation does not return",
         ErrorsNeverTold, "L4-dead-peer", says=HANGS),
    _lie("p-errors-spread", "after one failure every operation fails", ErrorsSpread,
         "L4-dead-peer", says=PEER_LOST),
    _lie("p-errors-end-the-process", "a failure ends the process", ErrorsEndTheProcess,
         "L4-close-dead-peer", "L4-dead-peer", says="exit code 9"),
    _lie("p-damages-the-twentieth", "the twentieth message of 256 KiB is damaged",
         DamagesTheTwentieth, "L4-churn", says="got other bytes"),
    _lie("p-sources-kept", "every source is kept for ever", SourcesKeptForEver,
         "L4-no-growth", says="more bytes"),
    _lie("p-descriptors-leak", "one descriptor leaks for every fifty messages to a peer",
         DescriptorsLeak, "L4-no-growth", says="more descriptors"),
)  # fmt: skip
