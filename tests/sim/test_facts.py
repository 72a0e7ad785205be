"""Each fact of a profile shows in what the simulated transport does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from commlayer_testkit.sim import (
    PROFILES,
    FailureKind,
    Profile,
    Rank,
    World,
    blank,
    filled,
)
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.failure import Failure

from commlayer.semantics import (
    Completion,
    NativeTimeout,
    PeerLoss,
    Poll,
    PostMayBlock,
    SizeMismatch,
    Threads,
)


def with_facts(base: str = "gloo", **facts: object) -> Profile:
    profile = PROFILES[base]
    p2p = msgspec.structs.replace(profile.semantics.p2p, **facts)
    return replace(profile, semantics=msgspec.structs.replace(profile.semantics, p2p=p2p))


def play(on: Profile, *bodies: Callable[[Rank], object]) -> tuple[Failure | None, float]:
    world = World(ReplayChoices(), on)
    try:
        world.start(len(bodies), lambda rank: bodies[rank.index](rank))
        world.run()
        return world.failure, world.now
    finally:
        world.close()


def check(on: Profile, *bodies: Callable[[Rank], object]) -> None:
    failure, _ = play(on, *bodies)
    assert failure is None, str(failure)


def receive(rank: Rank) -> None:
    rank.endpoint().recv(blank(16), 0)


@pytest.mark.parametrize(
    ("poll", "before", "after"),
    [(Poll.EXACT, True, True), (Poll.NEVER_BEFORE_WAIT, False, True)],
)
def test_poll(poll: Poll, before: bool, after: bool) -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 16)
        work = rank.endpoint().isend(source, 1)
        assert not work.is_completed()
        rank.sleep(1.0)
        assert work.is_completed() is before
        work.wait()
        assert work.is_completed() is after

    check(with_facts(poll=poll), body, receive)


def test_poll_that_blocks() -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 16)
        assert rank.endpoint().isend(source, 1).is_completed()

    check(with_facts(poll=Poll.BLOCKS), body, receive)


def test_second_wait_where_waits_repeat() -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 16)
        work = rank.endpoint().isend(source, 1)
        assert work.wait()
        assert work.wait()

    check(with_facts(wait_repeatable=True), body, receive)


def test_second_wait_blocks_for_the_group_timeout_and_takes_the_group_with_it() -> None:
    def body(rank: Rank) -> None:
        data = rank.endpoint()
        source, other = filled(1, 16), filled(2, 16)
        pending = data.isend(other, 1, tag=5)
        work = data.isend(source, 1)
        work.wait()
        with pytest.raises(RuntimeError, match="waited twice"):
            work.wait()
        assert rank.runtime.now() == 1800.0
        with pytest.raises(RuntimeError, match="waited twice"):
            pending.wait()
        with pytest.raises(RuntimeError, match="waited twice"):
            data.isend(source, 1)

    def peer(rank: Rank) -> None:
        receive(rank)
        rank.sleep(2000.0)
        with pytest.raises(RuntimeError, match="waited twice"):
            receive(rank)

    check(with_facts(), body, peer)


@pytest.mark.parametrize("timeout", list(NativeTimeout))
def test_expired_timeout(timeout: NativeTimeout) -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 16)
        work = rank.endpoint().isend(source, 1)
        if timeout is NativeTimeout.IGNORED:
            work.wait(1.0)
            assert rank.runtime.now() >= 5.0
            return
        with pytest.raises(RuntimeError):
            work.wait(1.0)
        if timeout is NativeTimeout.SAFE:
            work.wait()
            return
        with pytest.raises(RuntimeError, match="closed"):
            rank.endpoint().isend(source, 1)

    def peer(rank: Rank) -> None:
        rank.sleep(5.0)
        if timeout is NativeTimeout.DESTRUCTIVE:
            with pytest.raises(RuntimeError, match="closed"):
                receive(rank)
        else:
            receive(rank)

    check(with_facts(timeout=timeout, wait_repeatable=True), body, peer)


def test_dropped_work_wedges_the_pair() -> None:
    def body(rank: Rank) -> None:
        source, other = filled(1, 16), filled(2, 16)
        rank.endpoint().isend(source, 1, tag=1)
        rank.endpoint().send(other, 1, tag=2)

    def peer(rank: Rank) -> None:
        rank.endpoint().irecv(blank(16), 0, tag=1).wait()

    failure, _ = play(PROFILES["gloo"], body, peer)
    assert failure is not None
    assert failure.kind is FailureKind.LOST_MESSAGE


@pytest.mark.parametrize("policy", list(SizeMismatch))
def test_receive_too_small(policy: SizeMismatch) -> None:
    def body(rank: Rank) -> None:
        rank.endpoint().send(filled(1, 16), 1)

    def peer(rank: Rank) -> None:
        target = blank(8)
        if policy is SizeMismatch.ERROR:
            with pytest.raises(RuntimeError, match="truncated"):
                rank.endpoint().recv(target, 0)
        else:
            rank.endpoint().recv(target, 0)
            assert target.tolist() == [1] * 8

    failure, _ = play(with_facts(size_mismatch=policy), body, peer)
    if policy is SizeMismatch.ABORTS:
        assert failure is not None
        assert failure.kind is FailureKind.ABORT
    else:
        assert failure is None, str(failure)


def test_receive_too_large_leaves_the_tail() -> None:
    def body(rank: Rank) -> None:
        rank.endpoint().send(filled(1, 8), 1)

    def peer(rank: Rank) -> None:
        target = blank(16)
        rank.endpoint().recv(target, 0)
        assert target.tolist() == [1] * 8 + [0] * 8

    check(PROFILES["gloo"], body, peer)


def test_eager_sends_complete_before_the_receive_and_long_ones_do_not() -> None:
    def body(rank: Rank) -> None:
        data = rank.endpoint()
        short, long = filled(1, 8), filled(2, 16)
        data.isend(short, 1).wait()
        work = data.isend(long, 1)
        assert not work.is_completed()
        rank.sleep(1.0)
        assert not work.is_completed()
        work.wait()
        assert rank.runtime.now() >= 5.0

    def peer(rank: Rank) -> None:
        rank.sleep(5.0)
        first, second = blank(8), blank(16)
        rank.endpoint().recv(first, 0)
        rank.endpoint().recv(second, 0)
        assert (int(first[0]), int(second[0])) == (1, 2)

    check(with_facts("mpi", eager_bytes=8), body, peer)


@pytest.mark.parametrize(
    ("completion", "done"),
    [(Completion.LOCAL, True), (Completion.MATCHED, False), (Completion.DELIVERED, False)],
)
def test_what_completion_of_an_eager_send_means(completion: Completion, done: bool) -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 8)
        work = rank.endpoint().isend(source, 1)
        rank.sleep(1.0)
        assert work.operation.complete is done
        work.wait()

    def peer(rank: Rank) -> None:
        rank.sleep(5.0)
        rank.endpoint().recv(blank(8), 0)

    check(with_facts(eager_bytes=8, completion=completion), body, peer)


def test_tags_match_independently() -> None:
    def body(rank: Rank) -> None:
        data = rank.endpoint()
        one, two = filled(1, 16), filled(2, 16)
        first, second = data.isend(one, 1, tag=1), data.isend(two, 1, tag=2)
        second.wait()
        first.wait()

    def peer(rank: Rank) -> None:
        target = blank(16)
        rank.endpoint().recv(target, 0, tag=2)
        assert int(target[0]) == 2
        rank.endpoint().recv(target, 0, tag=1)
        assert int(target[0]) == 1

    check(PROFILES["gloo"], body, peer)


def test_post_that_blocks_only_at_first_use() -> None:
    profile = with_facts(post_may_block=PostMayBlock.FIRST_USE)

    def body(rank: Rank) -> None:
        data = rank.endpoint()
        one, two = filled(1, 16), filled(2, 16)
        first = data.isend(one, 1)
        assert rank.runtime.now() == 5.0
        second = data.isend(two, 1)
        assert rank.runtime.now() == 5.0
        first.wait()
        second.wait()

    def peer(rank: Rank) -> None:
        rank.sleep(5.0)
        receive(rank)
        rank.sleep(5.0)
        receive(rank)

    check(profile, body, peer)


def test_nothing_moves_outside_calls_where_progress_is_only_in_calls() -> None:
    def body(rank: Rank) -> None:
        source = filled(1, 64)
        work = rank.endpoint().isend(source, 1)
        rank.sleep(5.0)
        assert not work.operation.matched
        work.wait()

    def peer(rank: Rank) -> None:
        rank.endpoint().recv(blank(64), 0)

    check(PROFILES["mpi_rendezvous"], body, peer)


@pytest.mark.parametrize("threads", [Threads.FUNNELED, Threads.SERIALIZED])
def test_calls_from_forbidden_threads(threads: Threads) -> None:
    semantics = msgspec.structs.replace(PROFILES["gloo"].semantics, threads=threads)
    profile = replace(PROFILES["gloo"], semantics=semantics)

    def body(rank: Rank) -> None:
        data = rank.endpoint()
        source = filled(1, 16)

        def helper() -> None:
            data.isend(source, 1, tag=1)

        if threads is Threads.SERIALIZED:
            rank.spawn(helper, "helper")
            data.send(source, 1)
        else:
            rank.spawn(helper, "helper").join()

    failure, _ = play(profile, body, lambda rank: rank.sleep(1.0))
    assert failure is not None
    assert failure.kind is FailureKind.MISUSE
    assert "thread" in failure.what


@pytest.mark.parametrize("loss", list(PeerLoss))
def test_peer_loss(loss: PeerLoss) -> None:
    def body(rank: Rank) -> None:
        data = rank.endpoint()
        source = filled(1, 16)
        work = data.isend(source, 1)
        rank.sleep(1.0)
        rank.world.network().kill(1)
        if loss is PeerLoss.SILENT:
            with pytest.raises(RuntimeError, match="timed out"):
                work.wait(5.0)
            data.isend(source, 1)
            return
        with pytest.raises(RuntimeError, match="closed by peer"):
            work.wait()
        with pytest.raises(RuntimeError, match="closed by peer"):
            data.isend(source, 1)

    def peer(rank: Rank) -> None:
        rank.endpoint()

    profile = with_facts(peer_loss=loss, timeout=NativeTimeout.SAFE, dropped_work="continues")
    check(profile, body, peer)


def test_the_weakest_profile_is_the_default_semantics() -> None:
    from commlayer.semantics import Semantics

    assert PROFILES["adversary_weakest"].semantics == Semantics()


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_explain_themselves(name: str) -> None:
    assert PROFILES[name].name == name
    assert PROFILES[name].note
