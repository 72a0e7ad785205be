"""The schedule check: against an executor, and on the deadlocks that engines met."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from commlayer_testkit.schedule.check import (
    Action,
    Facts,
    Kind,
    Schedule,
    broadcast,
    check,
    follow,
    recv,
    send,
    synchronize,
    wait,
    work,
)
from commlayer_testkit.schedule.plans import pipeline_schedules
from commlayer_testkit.schedule.repair import Cure, Proposal, propose
from executor import Executor
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_facts

from commlayer.pipeline.topology import FoldedTopology, LinearTopology, Topology
from commlayer.semantics import OperationSemantics, Order, PostMayBlock, Semantics, WaitBlocks

_HOST = OperationSemantics(
    post_may_block=PostMayBlock.NEVER, order=Order.PER_TAG, max_outstanding_per_pair=0
)
_DEVICE = with_facts(_HOST, wait_blocks=WaitBlocks.STREAM, order=Order.IN_ORDER_STREAM)


def facts(operations: OperationSemantics, tags: bool = True) -> Semantics:
    return Semantics(p2p=operations, collective=operations, tags=tags)


TAGGED = facts(_HOST)
"""Rendezvous, tags match independently, the host waits."""
STREAM = facts(_DEVICE, tags=False)
"""Rendezvous, one stream a communicator, streams wait."""
BLOCKING = facts(with_facts(_DEVICE, post_may_block=PostMayBlock.ALWAYS), tags=False)
"""The same, and a send may hold up the host."""
CONNECTING = facts(with_facts(_DEVICE, post_may_block=PostMayBlock.FIRST_USE), tags=False)
"""The same, and the first use of a pair may hold up the host."""
EAGER = facts(with_facts(_HOST, eager_bytes=64))
EAGER_STREAM = facts(with_facts(_DEVICE, eager_bytes=64), tags=False)
WINDOW = facts(with_facts(_HOST, max_outstanding_per_pair=2))
WEAKEST = Semantics()
ALL = (TAGGED, STREAM, BLOCKING, CONNECTING, EAGER, EAGER_STREAM, WINDOW, WEAKEST)


def cures(schedules: Sequence[Schedule], of: Facts) -> dict[Cure, Proposal]:
    found = {proposal.cure: proposal for proposal in propose(schedules, of)}
    for proposal in found.values():
        assert check(proposal.schedules, proposal.facts).ok
    return found


# Deadlocks that engines met


def test_c14_a_headers_that_block() -> None:
    """Both ranks hold in the send of a header, of the fold and of the next batch."""
    topology = FoldedTopology(2)
    of = {"headers": TAGGED, "data": STREAM, "fold": STREAM}
    verdict = check(pipeline_schedules(topology, 2, blocking_headers=True), of)
    assert verdict.operations == (
        "header of send of chunk 0's output for batch 1",
        "header of receive of chunk 0's output for batch 1",
        "header of send of chunk 2's output for batch 0",
        "header of receive of chunk 2's output for batch 0",
    )
    assert "is called only after the return of" in str(verdict)
    assert Cure.WAIT_LATER in cures(pipeline_schedules(topology, 2, blocking_headers=True), of)
    assert check(pipeline_schedules(topology, 2, blocking_headers=False), of).ok


def test_c14_b_one_communicator() -> None:
    """send_fold(b) waits recv_fold(b), behind send(b+1), which waits recv(b+1), behind it."""
    topology = FoldedTopology(2)
    schedules = pipeline_schedules(topology, 2, one_channel=True)
    verdict = check(schedules, STREAM)
    assert verdict.operations == (
        "send of chunk 0's output for batch 1",
        "receive of chunk 0's output for batch 1",
        "send of chunk 2's output for batch 0",
        "receive of chunk 2's output for batch 0",
    )
    assert "is on the in-order stream behind" in str(verdict)
    cure = cures(schedules, STREAM)[Cure.CHANNEL]
    assert "a channel of their own" in str(cure)
    assert check(pipeline_schedules(topology, 2), STREAM).ok
    assert check(schedules, TAGGED).ok
    assert check(pipeline_schedules(topology, 1, one_channel=True), STREAM).ok


def both(first: str, *, channels: tuple[str, str] = ("data", "data")) -> list[list[Action]]:
    """Two ranks send to and receive from each other; `channels` are 0 to 1's and 1 to 0's."""
    schedules = []
    for rank, (out, into) in enumerate((channels, channels[::-1])):
        out_op = send(1 - rank, f"send of {rank}", channel=out)
        in_op = recv(1 - rank, f"receive of {rank}", channel=into)
        posts = [out_op, in_op] if first == "send" else [in_op, out_op]
        schedules.append([*posts, wait(posts[0].name), wait(posts[1].name)])
    return schedules


def test_c13_sends_first_where_a_post_may_block() -> None:
    schedules = both("send", channels=("up", "down"))
    verdict = check(schedules, BLOCKING)
    assert verdict.operations == ("send of 0", "receive of 1", "send of 1", "receive of 0")
    assert check(schedules, STREAM).ok
    found = cures(schedules, BLOCKING)
    assert found[Cure.RECEIVE_FIRST].steps == ("rank 1 posts 'receive of 1' before 'send of 1'",)
    assert Cure.BATCH in found
    assert Cure.CHANNEL not in found


def test_c17_first_use_of_a_pair_may_block() -> None:
    """Two directions, a communicator each: each rank first uses another one."""
    schedules = both("send", channels=("up", "down"))
    verdict = check(schedules, CONNECTING)
    assert verdict.operations == ("send of 0", "receive of 1", "send of 1", "receive of 0")
    assert "connects to the rank of" in str(verdict)
    assert Cure.RECEIVE_FIRST in cures(schedules, CONNECTING)
    warmed_up = [[send(1, channel="up"), recv(1, channel="down")],
                 [recv(0, channel="up"), send(0, channel="down")]]  # fmt: skip
    assert check([w + s for w, s in zip(warmed_up, schedules, strict=True)], CONNECTING).ok


def test_c18_crossed_on_one_stream() -> None:
    schedules = both("send")
    assert not check(schedules, STREAM).ok
    assert check(both("send", channels=("up", "down")), STREAM).ok
    assert list(cures(schedules, STREAM)) == [Cure.CHANNEL, Cure.BATCH, Cure.RECEIVE_FIRST]


def test_c27_receives_first() -> None:
    """Sends first cure it where they are eager; one group does where groups start together."""
    assert not check(both("receive"), STREAM).ok
    assert not check(both("receive"), EAGER_STREAM).ok
    small = [
        [replace(a, nbytes=64) if a.kind is Kind.SEND else a for a in schedule]
        for schedule in both("send")
    ]
    assert check(small, EAGER_STREAM).ok
    large = [
        [replace(a, nbytes=65) if a.kind is Kind.SEND else a for a in schedule]
        for schedule in both("send")
    ]
    assert not check(large, EAGER_STREAM).ok
    grouped = [[tuple(schedule[:2]), *schedule[2:]] for schedule in both("receive")]
    assert check(grouped, STREAM).ok


def late_receives(up: str, down: str) -> list[list[Action]]:
    schedules = []
    for rank, (out, into) in enumerate(((up, down), (down, up))):
        peer = 1 - rank
        schedules.append(
            [
                recv(peer, "header", channel="headers"),
                send(peer, "own header", channel="headers"),
                send(peer, f"device send of {rank}", channel=out),
                wait("header"),
                recv(peer, f"late device receive of {rank}", channel=into),
                wait(f"late device receive of {rank}"),
            ]
        )
    return schedules


def test_c33_late_device_receives() -> None:
    of = {"headers": TAGGED, "one": STREAM, "up": STREAM, "down": STREAM}
    verdict = check(late_receives("one", "one"), of)
    assert verdict.operations == (
        "device send of 0",
        "late device receive of 1",
        "device send of 1",
        "late device receive of 0",
    )
    found = cures(late_receives("one", "one"), of)
    assert Cure.CHANNEL in found
    assert "if it can without what it waits for now" in str(found[Cure.RECEIVE_FIRST])
    assert check(late_receives("up", "down"), of).ok


def test_c7_broadcast_and_send() -> None:
    """On one communicator they wait for each other; on two, only if one stream orders them."""

    def schedules(channel: str, stream: str) -> list[list[Action]]:
        tokens = broadcast(0, "tokens", channel=channel, stream=stream, blocking=True)
        hidden = send(1, "hidden", blocking=True), recv(0, "hidden", blocking=True)
        return [[follow("side", "main"), tokens, hidden[0]], [hidden[1], tokens]]

    assert not check(schedules("data", "side"), STREAM).ok
    assert Cure.CHANNEL in cures(schedules("data", "side"), STREAM)
    assert check(schedules("tokens", "side"), STREAM).ok
    assert not check(schedules("tokens", "main"), STREAM).ok
    assert not check(schedules("tokens", "main"), TAGGED).ok


def test_c22_batches_of_unequal_size() -> None:
    def schedules(sizes: tuple[int, int]) -> list[list[Action | tuple[Action, ...]]]:
        ranks: list[list[Action | tuple[Action, ...]]] = [[], []]
        for rank, size in enumerate(sizes):
            for start in range(0, 4, size):
                names = [f"message {n}" for n in range(start, start + size)]
                make = send if rank == 0 else recv
                ranks[rank].append(tuple(make(1 - rank, name) for name in names))
                ranks[rank] += [wait(name) for name in names]
                ranks[rank].append(synchronize())
                answer = recv if rank == 0 else send
                ranks[rank].append(answer(1 - rank, "answer", channel="reply", blocking=True))
                ranks[rank].append(synchronize())
        return ranks

    verdict = check(schedules((2, 4)), STREAM)
    assert verdict.cycle
    assert check(schedules((2, 2)), STREAM).ok


def test_crossed_waits() -> None:
    schedules = [
        [recv(1 - r, f"r{r}"), wait(f"r{r}"), work(), send(1 - r, f"s{r}")] for r in range(2)
    ]
    verdict = check(schedules, TAGGED)
    assert verdict.operations == ("r0", "s1", "wait for r1", "r1", "s0", "wait for r0")
    assert str(verdict).startswith("can deadlock:\n  rank 0: r0 (receive, channel data)\n    needs")
    found = cures(schedules, TAGGED)
    assert list(found) == [Cure.WAIT_LATER]
    assert "if that does not need it" in str(found[Cure.WAIT_LATER])


@pytest.mark.parametrize("size", [3, 4, 5])
def test_a_ring(size: int) -> None:
    schedules = [
        [send((r + 1) % size, f"s{r}"), recv((r - 1) % size, f"r{r}")] * 2 for r in range(size)
    ]
    assert len(check(schedules, BLOCKING).cycle) == 2 * size
    assert cures(schedules, BLOCKING).keys() >= {Cure.BATCH, Cure.RECEIVE_FIRST}
    assert check(schedules, TAGGED).ok


def test_messages_without_counterpart() -> None:
    verdict = check([[send(1, "lonely"), recv(1, blocking=True)], [send(0)]], TAGGED)
    assert not verdict.ok
    assert [str(place) for place in verdict.unmatched] == ["rank 0: lonely (send, channel data)"]
    assert not verdict.cycle
    assert "no other rank has the counterpart of rank 0: lonely" in str(verdict)
    assert propose([[send(1)], []], TAGGED) == ()
    differ = [[broadcast(0, "a")], [broadcast(1, "b")]]
    assert len(check(differ, TAGGED).unmatched) == 2
    one_ahead = [[broadcast(0, "a"), broadcast(0, "b")], [broadcast(0, "a")]]
    assert [place.action.name for place in check(one_ahead, TAGGED).unmatched] == ["b"]


def test_tags() -> None:
    schedules = [
        [send(1, "a", tag=1, blocking=True), send(1, "b", tag=2, blocking=True)],
        [recv(0, "b", tag=2, blocking=True), recv(0, "a", tag=1, blocking=True)],
    ]
    assert not check(schedules, TAGGED).ok
    assert check(schedules, facts(_HOST, tags=False)).ok
    assert check(schedules, EAGER).ok is False
    posted = [[replace(a, blocking=False) for a in s] for s in schedules]
    assert check(posted, TAGGED).ok


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        ([[send(1)]], "rank 1 is not one of 1"),
        ([[send(0)], []], "does not send to itself"),
        ([[wait("x")], []], "nothing of that name was posted"),
        ([[(work(),)], []], "a group holds operations"),
        ([[(send(1, blocking=True),)], [recv(0)]], "a group holds operations"),
    ],
)
def test_schedules_that_cannot_be_called(schedules: list[Schedule], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(schedules, TAGGED)
    with pytest.raises(ValueError, match="no facts are given for channel 'data'"):
        check([[send(1)], [recv(0)]], {"fold": TAGGED})


# The pipeline of every topology


def arrival_order(topology: Topology, batches: int, seed: int) -> list[list[tuple[int, int]]]:
    """Orders of calls in which each rank takes, by chance, one whose input was sent."""
    chance = random.Random(seed)
    made = [0] * topology.chunks
    taken = [[0] * len(topology.calls(rank)) for rank in range(topology.ranks)]
    orders: list[list[tuple[int, int]]] = [[] for _ in range(topology.ranks)]
    while True:
        ready = []
        for rank in range(topology.ranks):
            for call, stages in enumerate(topology.calls(rank)):
                batch, chunk = taken[rank][call], topology.chunk(stages[0], rank)
                if batch < batches and (chunk == 0 or made[chunk - 1] > batch):
                    ready.append((rank, call, batch))
        if not ready:
            return orders
        rank, call, batch = chance.choice(ready)
        taken[rank][call] += 1
        orders[rank].append((batch, call))
        for v in topology.calls(rank)[call]:
            made[topology.chunk(v, rank)] += 1


def by_direction(schedules: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """A communicator for each direction of each channel, as IN_ORDER_STREAM asks for."""

    def moved(rank: int, action: Action) -> Action:
        if not action.posts:
            return action
        ends = [rank, action.peer] if action.kind is Kind.SEND else [action.peer, rank]
        return replace(action, channel=f"{action.channel} {ends}")

    return [[moved(rank, a) for a in schedule] for rank, schedule in enumerate(schedules)]


TOPOLOGIES = [FoldedTopology(n, v) for n in range(1, 5) for v in range(1, 5)]


@pytest.mark.parametrize("topology", [*TOPOLOGIES, LinearTopology(3)], ids=repr)
def test_channels_of_the_topology_in_the_same_order_everywhere(topology: Topology) -> None:
    for batches in (1, 2, 3):
        assert check(pipeline_schedules(topology, batches), STREAM).ok


def test_ranks_that_take_calls_as_messages_arrive() -> None:
    """A channel a sweep is enough up to three ranks; from four on each direction needs its own."""
    failed = set()
    for topology in TOPOLOGIES:
        for seed in range(12):
            orders = arrival_order(topology, 4, seed)
            schedules = pipeline_schedules(topology, 4, turns=lambda t, r, b, o=orders: o[r])
            if not check(schedules, STREAM).ok:
                failed.add((topology.ranks, topology.virtual_stages))
            assert check(by_direction(schedules), STREAM).ok
            assert check(schedules, TAGGED).ok
    assert (3, 2) not in failed
    assert (4, 2) in failed


# Against the executor


@st.composite
def schedules(
    draw: st.DrawFn, broadcasts: bool = True, groups: bool = True
) -> list[list[Action | tuple[Action, ...]]]:
    size = draw(st.integers(2, 3))
    ranks: list[list[Action | tuple[Action, ...]]] = [[] for _ in range(size)]
    posts: list[list[Action]] = [[] for _ in range(size)]
    for number in range(draw(st.integers(1, 5))):
        channel = draw(st.sampled_from(["data", "fold"]))
        if broadcasts and draw(st.integers(0, 5)) == 0:
            source, nbytes = draw(st.integers(0, size - 1)), draw(st.sampled_from([None, 8]))
            for rank in range(size):
                name = f"broadcast {number}"
                posts[rank].append(broadcast(source, name, channel=channel, nbytes=nbytes))
            continue
        src = draw(st.integers(0, size - 1))
        dst = (src + draw(st.integers(1, size - 1))) % size
        tag, nbytes = draw(st.integers(0, 1)), draw(st.sampled_from([None, 8]))
        posts[src].append(send(dst, f"send {number}", channel=channel, tag=tag, nbytes=nbytes))
        posts[dst].append(recv(src, f"receive {number}", channel=channel, tag=tag))
    if draw(st.integers(0, 9)) == 0:
        rank = draw(st.integers(0, size - 1))
        del posts[rank][-1:]
    for rank in range(size):
        unwaited: list[str] = []
        stream = st.sampled_from(["main", "main", "side"])
        for action in draw(st.permutations(posts[rank])):
            how = draw(st.integers(0, 6))
            action = replace(action, stream=draw(stream))
            previous = ranks[rank][-1] if ranks[rank] else None
            grouped = isinstance(previous, Action) and previous.posts and not previous.blocking
            if groups and how == 0 and grouped:
                ranks[rank][-1] = (previous, action)
                unwaited.append(action.name)
                continue
            if how == 1:
                ranks[rank].append(replace(action, blocking=True))
                continue
            ranks[rank].append(action)
            unwaited.append(action.name)
            if how == 2:
                name = unwaited.pop(draw(st.integers(0, len(unwaited) - 1)))
                ranks[rank].append(wait(name, stream=draw(stream)))
            elif how == 3:
                ranks[rank].append(synchronize(draw(stream)))
            elif how == 4:
                ranks[rank].append(follow("side", "main"))
    return ranks


@settings(max_examples=150)
@given(schedules(), st.sampled_from(ALL), st.sampled_from(ALL), st.integers(0, 99))
def test_the_check_says_what_an_executor_finds(
    lists: list[list[Action | tuple[Action, ...]]], data: Semantics, fold: Semantics, seed: int
) -> None:
    of = {"data": data, "fold": fold}
    verdict = check(lists, of)
    for order in range(3):
        assert Executor(lists, of).run(seed + order) == (not verdict.stuck)
    assert verdict.ok == (not verdict.stuck and not verdict.unmatched)
    if verdict.stuck:
        assert verdict.cycle or verdict.unmatched
        stuck = {(place.rank, place.action.name) for place in verdict.stuck}
        for need in verdict.cycle:
            assert (need.place.rank, need.place.action.name) in stuck
    for proposal in propose(lists, of):
        assert Executor(proposal.schedules, proposal.facts).run(seed)


@settings(max_examples=100)
@given(schedules(), st.sampled_from(ALL))
def test_rendezvous_is_the_worse_choice(
    lists: list[list[Action | tuple[Action, ...]]], of: Semantics
) -> None:
    """What cannot deadlock with weaker facts cannot with stronger ones."""
    stronger = with_facts(
        of, p2p=with_facts(of.p2p, post_may_block=PostMayBlock.NEVER, eager_bytes=1 << 30)
    )
    if check(lists, of).ok:
        assert check(lists, stronger).ok
