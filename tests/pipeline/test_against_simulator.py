"""What the schedule check says is what the simulated transports do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commlayer_testkit.schedule.check import Action, Kind, Schedule, check, recv, send
from commlayer_testkit.schedule.plans import pipeline_schedules
from commlayer_testkit.sim import Profile, Rank, World, filled
from commlayer_testkit.sim.choices import ReplayChoices
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.profiles import GLOO, HCCL, NCCL, XCCL
from hypothesis import given, settings
from hypothesis import strategies as st
from test_deadlocks import both, schedules

from commlayer.pipeline.topology import FoldedTopology
from commlayer.semantics import WaitBlocks


class Caller:
    """Makes the calls of one rank's schedule, and at the end waits for all of them."""

    def __init__(self, rank: Rank, profiles: Mapping[str, Profile]) -> None:
        self.rank = rank
        self.profiles = profiles
        self.on_device: dict[str, Any] = {}
        self.unwaited: dict[str, Any] = {}
        self.kept: list[Any] = []
        self.streams = {"main": rank.device.default_stream, "side": rank.device.stream("side")}

    def run(self, schedule: Schedule) -> None:
        for action in schedule:
            assert isinstance(action, Action)
            with self.streams[action.stream]:
                self.call(action)
        for name in list(self.unwaited):
            self.wait(name)
        self.rank.device.synchronize()

    def call(self, action: Action) -> None:
        if action.posts:
            self.post(action)
        elif action.kind is Kind.WAIT:
            self.wait(action.target)
        elif action.kind is Kind.SYNCHRONIZE:
            self.streams[action.stream].synchronize()
        elif action.kind is Kind.FOLLOW:
            self.streams[action.stream].wait_stream(self.streams[action.target])

    def post(self, action: Action) -> None:
        profile = self.profiles[action.channel]
        endpoint = self.rank.endpoint(action.channel, profile)
        on_device = profile.semantics.p2p.wait_blocks is WaitBlocks.STREAM
        tensor = self.rank.arena.full(1, 8) if on_device else filled(1, 8)
        post = endpoint.isend if action.kind is Kind.SEND else endpoint.irecv
        work = post(tensor, action.peer, action.tag)
        self.kept.append((tensor, work))
        self.unwaited[action.name] = work
        if on_device:
            self.on_device[action.name] = work
        if action.blocking:
            self.wait(action.name)

    def wait(self, name: str) -> None:
        """Wait: for a host's work once, as some transports demand."""
        work = self.unwaited.pop(name, self.on_device.get(name))
        if work is not None:
            work.wait()


def simulated(lists: Sequence[Schedule], profiles: Mapping[str, Profile]) -> FailureKind | None:
    world = World(ReplayChoices(), HCCL)
    try:

        def body(rank: Rank) -> None:
            Caller(rank, profiles).run(lists[rank.index])

        world.start(len(lists), body)
        world.run()
    finally:
        world.close()
    return None if world.failure is None else world.failure.kind


def agrees(lists: Sequence[Schedule], profiles: Mapping[str, Profile]) -> None:
    verdict = check(lists, {channel: on.semantics for channel, on in profiles.items()})
    outcome = simulated(lists, profiles)
    if verdict.stuck:
        assert outcome in (FailureKind.DEADLOCK, FailureKind.WATCHDOG)
    else:
        assert outcome is None


def test_deadlocks_of_the_pipeline() -> None:
    topology = FoldedTopology(2)
    device = {"data": HCCL, "fold": HCCL, "headers": GLOO}
    agrees(pipeline_schedules(topology, 2), device)
    agrees(pipeline_schedules(topology, 2, one_channel=True), device)
    agrees(pipeline_schedules(topology, 2, blocking_headers=True), device)
    agrees(pipeline_schedules(topology, 2, blocking_headers=False), device)
    agrees(pipeline_schedules(FoldedTopology(3), 2, one_channel=True), device)
    for first in ("send", "receive"):
        agrees(both(first), device)
        agrees(both(first, channels=("data", "fold")), device)


@settings(max_examples=60)
@given(
    schedules(broadcasts=False, groups=False),
    st.sampled_from([GLOO, HCCL]),
    st.sampled_from([GLOO, HCCL]),
)
def test_any_schedule(lists: list[Schedule], data: Profile, fold: Profile) -> None:
    agrees(lists, {"data": data, "fold": fold})


@settings(max_examples=60)
@given(
    schedules(broadcasts=False, groups=False),
    st.sampled_from([NCCL, XCCL]),
    st.sampled_from([GLOO, HCCL, NCCL, XCCL]),
)
def test_no_deadlock_is_missed_where_a_post_may_block(
    lists: list[Schedule], data: Profile, fold: Profile
) -> None:
    misses_nothing(lists, {"data": data, "fold": fold})


def test_a_pair_is_connected_by_receives_too() -> None:
    lists: list[Schedule] = [
        [recv(1, "a"), recv(1, "b"), send(1, "c"), send(1, "d", channel="fold")],
        [send(0, "a"), send(0, "b"), recv(0, "d", channel="fold", blocking=True), recv(0, "c")],
    ]
    agrees(lists, {"data": NCCL, "fold": GLOO})
    agrees(lists, {"data": XCCL, "fold": GLOO})


def misses_nothing(lists: Sequence[Schedule], profiles: Mapping[str, Profile]) -> None:
    verdict = check(lists, {channel: on.semantics for channel, on in profiles.items()})
    assert verdict.stuck or simulated(lists, profiles) is None
