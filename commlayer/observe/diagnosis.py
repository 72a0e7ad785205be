"""From what every rank waits for to who waits for whom, and why."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from commlayer.observe.report import (
    Case,
    Finding,
    Missing,
    RankWait,
    Report,
    describe,
    printable,
    seconds,
)
from commlayer.wire.rank_state import LaneState, PendingOperation, RankState
from commlayer.wire.tags import BROADCAST

_ORDER = list(Case)


def diagnose(
    states: Mapping[int, RankState],
    *,
    name: str,
    rank: int,
    world_size: int,
    older_than: float,
    reason: str,
    may_idle: Collection[str] = (),
) -> Report:
    """Join the states of the ranks that answered.

    On `may_idle` channels a receive that its sender has nothing for is as it should be.

    Two ranks agree on which message an operation means by its lane and number.
    What is younger than `older_than` seconds is shown and not judged: ranks are
    asked one after the other, and a message may be on its way in between.

    What a rank waits for may be the consequence of what its peer waits for:
    findings that are no such consequence come first, in the order of `Case`.
    Ranks of a circle that have not called a broadcast equally often may be about
    to, so that the circle comes first.
    """
    join = _Join(states, world_size, older_than, may_idle)
    waits = tuple(join.waits())
    blocking = _blocking(waits)
    cycles = tuple(_cycles(blocking))
    circular = {pair for cycle in cycles for pair in _pairs(cycle)}
    suspicions = [*join.suspicions(waits, circular), *_circles(cycles, blocking)]
    blocked = {wait.rank for wait in blocking}
    circling = {member for cycle in cycles for member in cycle}

    def order(suspicion: _Suspicion) -> tuple[bool, int, float]:
        culprit, finding = suspicion.culprit, suspicion.finding
        consequence = culprit in blocked and culprit not in circling
        if finding.case is Case.BROADCAST_MISMATCH:
            consequence |= not circular.isdisjoint(_both_ways(finding.ranks))
        return consequence, _ORDER.index(finding.case), -suspicion.age

    return Report(
        name=name,
        rank=rank,
        world_size=world_size,
        reason=reason,
        older_than=older_than,
        states=tuple(states[r] for r in sorted(states)),
        silent=tuple(r for r in range(world_size) if r not in states),
        waits=waits,
        cycles=cycles,
        findings=tuple(_merged(sorted(suspicions, key=order))),
    )


class _Suspicion(NamedTuple):
    """A finding, the rank that would have to do something, and for how long it has not."""

    finding: Finding
    culprit: int
    age: float


class _Join:
    """The states of several ranks, looked at together."""

    def __init__(
        self,
        states: Mapping[int, RankState],
        size: int,
        older_than: float,
        may_idle: Collection[str],
    ) -> None:
        self._states = states
        self._size = size
        self._older_than = older_than
        self._may_idle = may_idle
        self._lanes: dict[tuple[int, str, str, int, str], LaneState] = {
            (rank, lane.channel, lane.tag, lane.peer, lane.direction): lane
            for rank, state in states.items()
            for lane in state.lanes
        }

    def waits(self) -> Iterator[RankWait]:
        """Every old operation that needs another rank, oldest first."""
        old = [
            (rank, operation)
            for rank, state in self._states.items()
            for operation in state.operations
            if operation.age >= self._older_than
            and operation.direction != "track"
            and operation.peer < self._size
        ]
        for rank, operation in sorted(old, key=lambda entry: -entry[1].age):
            missing = self._missing(rank, operation)
            idle = operation.direction == "recv" and operation.channel in self._may_idle
            if missing == "transfer" or not idle:
                yield RankWait(rank, operation.peer, operation, missing)

    def _missing(self, rank: int, operation: PendingOperation) -> Missing:
        peer = self._states.get(operation.peer)
        if peer is None:
            return "answer"
        way = "recv" if operation.direction == "send" else "send"
        end = self._lanes.get((operation.peer, operation.channel, operation.tag, rank, way))
        if end is None:
            return "transfer" if peer.omitted else "post"
        return "post" if end.count <= operation.number else "transfer"

    def suspicions(
        self, waits: Sequence[RankWait], circular: Collection[tuple[int, int]]
    ) -> Iterator[_Suspicion]:
        """What may be wrong; `circular` pairs of ranks wait for each other in a circle."""
        explained = set()
        for wait in waits:
            operation = wait.operation
            key = wait.rank, wait.peer, operation.direction, operation.channel, operation.tag
            if key not in explained:
                explained.add(key)
                suspicion = self._explain(wait, waits)
                if (wait.rank, wait.peer) not in circular or suspicion.finding.case not in _PLAIN:
                    yield suspicion
        for rank, state in self._states.items():
            yield from self._alone(rank, state)
            for lane in state.lanes:
                if lane.unclaimed and lane.seconds >= self._older_than:
                    yield self._unclaimed(rank, lane)

    def _explain(self, wait: RankWait, waits: Sequence[RankWait]) -> _Suspicion:
        rank, peer, operation = wait.rank, wait.peer, wait.operation
        details = [_waits_for(wait)]
        if wait.missing == "answer":
            case, text = Case.PEER_SILENT, f"rank {peer} does not answer"
        elif wait.missing == "transfer":
            case = Case.TRANSFER
            text = f"ranks {rank} and {peer} have both posted, and the transport is not done"
        elif operation.direction == "recv" and not operation.awaited:
            case = Case.IDLE
            text = f"rank {rank} receives ahead from rank {peer}, and no thread waits for it"
        elif broadcast := self._broadcast(wait):
            case, text, more = broadcast
            details += more
        elif elsewhere := self._elsewhere(wait, waits):
            case = Case.WRONG_LANE
            text = f"ranks {rank} and {peer} use different lanes"
            details.append(elsewhere)
        else:
            case, text = self._absent(wait)
            details += self._instead(peer)
        return _Suspicion(Finding(case, (rank, peer), text, tuple(details)), peer, operation.age)

    def _broadcast(self, wait: RankWait) -> tuple[Case, str, list[str]] | None:
        operation, peer = wait.operation, wait.peer
        if operation.tag != BROADCAST:
            return None
        step = operation.step
        called = self._called(peer, operation.channel)
        if called <= step:
            mine = max(step + 1, self._called(wait.rank, operation.channel))
            text = _disagree(operation.channel, {peer: called, wait.rank: mine})
            return Case.BROADCAST_MISMATCH, text, self._instead(peer)
        # It has called this broadcast and has not posted what this rank waits for.
        same = [
            _waits_for(RankWait(peer, other.peer, other, "post"))
            for other in self._states[peer].operations
            if (other.channel, other.tag, other.step) == (operation.channel, BROADCAST, step)
        ]
        return Case.BROADCAST_SOURCE, _different_sources(wait.rank, peer, step), same[:1]

    def _called(self, rank: int, channel: str) -> int:
        return dict(self._states[rank].steps).get(channel, 0) if rank in self._states else 0

    def _elsewhere(self, wait: RankWait, waits: Sequence[RankWait]) -> str:
        """What goes between the two ranks on another lane, both sides of which wait."""
        rank, peer, operation = wait.rank, wait.peer, wait.operation
        lane = operation.channel, operation.tag
        for other in waits:
            if (
                (other.rank, other.peer, other.missing) == (peer, rank, "post")
                and other.operation.direction != operation.direction
                and other.operation.tag != BROADCAST
                and (other.operation.channel, other.operation.tag) != lane
            ):
                return _waits_for(other)
        if operation.direction == "recv":
            for state in self._states[rank].lanes:
                if (
                    state.unclaimed
                    and state.peer == peer
                    and state.tag != BROADCAST
                    and (state.channel, state.tag) != lane
                ):
                    return f"rank {rank} has not asked for {_unclaimed(state)}"
        return ""

    def _absent(self, wait: RankWait) -> tuple[Case, str]:
        rank, peer = wait.rank, wait.peer
        for thread in self._states[peer].threads:
            if thread.call.startswith("torch."):
                return Case.FOREIGN_CALL, (
                    f"rank {peer} is in {printable(thread.call)} at {printable(thread.site)}"
                )
        if wait.operation.direction == "send":
            return Case.NEVER_RECEIVED, f"rank {peer} has not asked for what rank {rank} sends"
        return Case.NEVER_SENT, f"rank {peer} has not sent what rank {rank} receives"

    def _instead(self, rank: int) -> list[str]:
        """What a rank waits for itself."""
        for operation in self._states[rank].operations:
            if operation.awaited and operation.age >= self._older_than:
                return [_waits_for(RankWait(rank, operation.peer, operation, "post"))]
        return []

    def _alone(self, rank: int, state: RankState) -> Iterator[_Suspicion]:
        if state.held_up:
            text = f"rank {rank} waits for room under the bounds, in {state.held_up} "
            text += "thread" if state.held_up == 1 else "threads"
            yield _Suspicion(Finding(Case.BOUND_REACHED, (rank,), text), rank, 0.0)
        for operation in state.operations:
            if operation.direction == "track" and operation.age >= self._older_than:
                text = f"rank {rank} has waited {seconds(operation.age)} for tracked work"
                detail = describe(operation)
                finding = Finding(Case.TRACKED, (rank,), text, (detail,))
                yield _Suspicion(finding, rank, operation.age)

    def _unclaimed(self, rank: int, lane: LaneState) -> _Suspicion:
        case, text = (
            Case.NEVER_RECEIVED,
            f"rank {rank} has not asked for what rank {lane.peer} sent",
        )
        if lane.tag == BROADCAST:
            counts = {each: self._called(each, lane.channel) for each in (lane.peer, rank)}
            if counts[rank] < counts[lane.peer] or lane.peer not in self._states:
                case, text = Case.BROADCAST_MISMATCH, _disagree(lane.channel, counts)
            else:  # as many calls, and none of them has asked for this
                case = Case.BROADCAST_SOURCE
                text = _different_sources(lane.peer, rank, counts[lane.peer] - 1)
        details = (
            f"rank {rank} has not asked for {_unclaimed(lane)}, here for {seconds(lane.seconds)}",
            *self._instead(rank),
        )
        return _Suspicion(Finding(case, (lane.peer, rank), text, details), rank, lane.seconds)


_PLAIN = (Case.NEVER_SENT, Case.NEVER_RECEIVED)
"""Cases that say no more than that a rank waits."""


def _waits_for(wait: RankWait) -> str:
    return (
        f"rank {wait.rank} has waited {seconds(wait.operation.age)} for {describe(wait.operation)}"
    )


def _disagree(channel: str, called: Mapping[int, int]) -> str:
    ranks = sorted(called)
    counts = ", ".join(f"rank {rank} has called {called[rank]}" for rank in ranks)
    return (
        f"ranks {ranks[0]} and {ranks[-1]} disagree on the broadcasts of channel "
        f"{printable(channel)}: {counts}"
    )


def _different_sources(one: int, other: int, step: int) -> str:
    low, high = sorted((one, other))
    return f"ranks {low} and {high} name different sources for broadcast {step}"


def _unclaimed(lane: LaneState) -> str:
    what = "message" if lane.unclaimed == 1 else "messages"
    return (
        f"{lane.unclaimed} {what} of rank {lane.peer} (channel {printable(lane.channel)}, "
        f"tag {printable(lane.tag)})"
    )


def _merged(suspicions: Iterable[_Suspicion]) -> list[Finding]:
    """Findings of one headline are one, with the details of all."""
    merged: dict[str, Finding] = {}
    for finding, _, _ in suspicions:
        before = merged.get(finding.text, finding)
        details = dict.fromkeys((*before.details, *finding.details))
        merged[finding.text] = replace(before, details=tuple(details))
    return list(merged.values())


def _blocking(waits: Sequence[RankWait]) -> list[RankWait]:
    """The waits that keep a rank from going on: those of its threads, or all if it has none."""
    needing = [wait for wait in waits if wait.missing != "transfer"]
    waiting = {wait.rank for wait in needing if wait.operation.awaited}
    return [wait for wait in needing if wait.operation.awaited or wait.rank not in waiting]


def _cycles(waits: Sequence[RankWait]) -> Iterator[tuple[int, ...]]:
    """Circles in the wait-for graph, none sharing a rank: the shortest through each lowest rank."""
    edges: dict[int, list[int]] = {}
    for wait in waits:
        if wait.missing == "post" and wait.peer not in edges.setdefault(wait.rank, []):
            edges[wait.rank].append(wait.peer)
    used: set[int] = set()
    for start in sorted(edges):
        if start not in used:
            cycle = _shortest(edges, start, used)
            used.update(cycle)
            if cycle:
                yield cycle


def _shortest(edges: Mapping[int, Sequence[int]], start: int, without: set[int]) -> tuple[int, ...]:
    before = {start: start}
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for peer in edges.get(rank, ()):
            if peer == start:
                path = [rank]
                while path[-1] != start:
                    path.append(before[path[-1]])
                return tuple(reversed(path))
            if peer not in before and peer not in without:
                before[peer] = rank
                queue.append(peer)
    return ()


def _both_ways(ranks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return (ranks[0], ranks[-1]), (ranks[-1], ranks[0])


def _pairs(cycle: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(cycle, (*cycle[1:], cycle[0]), strict=True)


def _circles(cycles: Sequence[tuple[int, ...]], waits: Sequence[RankWait]) -> Iterator[_Suspicion]:
    for cycle in cycles:
        edges = [
            next(wait for wait in waits if (wait.rank, wait.peer) == pair) for pair in _pairs(cycle)
        ]
        if any(edge.operation.awaited for edge in edges):
            names = ", ".join(map(str, cycle[:-1]))
            text = f"ranks {names} and {cycle[-1]} wait for each other"
            finding = Finding(Case.CYCLE, cycle, text, tuple(map(_waits_for, edges)))
            yield _Suspicion(finding, cycle[0], min(edge.operation.age for edge in edges))
