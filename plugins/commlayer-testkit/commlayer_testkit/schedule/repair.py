"""Cures for schedules that can deadlock.  Each was tried: what is proposed passes the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from commlayer_testkit.schedule.check import (
    Action,
    Facts,
    Group,
    Kind,
    Place,
    Schedule,
    Verdict,
    check,
    wait,
)

Plan = list[tuple[Action | Group, ...]]
"""The schedules of all ranks."""


class Cure(str, Enum):
    """What kind of change, from the one that asks least of the engine."""

    CHANNEL = "own channel"
    """Messages that wait on others go over a channel of their own."""
    BATCH = "batch"
    """Operations are posted as one group."""
    RECEIVE_FIRST = "receive first"
    """Some ranks post a receive before the send that it waited behind (parity order)."""
    WAIT_LATER = "wait later"
    """A rank waits for an operation only after it has posted others."""


@dataclass(frozen=True)
class Proposal:
    """A change after which the schedules pass the check.

    `steps` says in words what to change; `schedules` and `facts` are the result.
    """

    cure: Cure
    steps: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    facts: Facts

    def __str__(self) -> str:
        return f"{self.cure.value}: {'; '.join(self.steps)}"


def propose(schedules: Sequence[Schedule], facts: Facts) -> tuple[Proposal, ...]:
    """The cures that work alone, in the order of `Cure`; none for schedules that pass.

    None either for messages without counterpart: those are for the engine to
    correct.  A cure moves posts and waits; whether what a message carries is
    computed by then is for the engine to judge, and the words say where it matters.
    """
    plan = [tuple(schedule) for schedule in schedules]
    verdict = check(plan, facts)
    if verdict.ok or verdict.unmatched:
        return ()
    found = (_cured(cure, change, plan, facts, verdict) for cure, change in _CHANGES.items())
    return tuple(proposal for proposal in found if proposal is not None)


@dataclass(frozen=True)
class _Change:
    step: str
    plan: Plan
    facts: Facts


_Changes = Callable[[Plan, Facts, Verdict], Iterator[_Change]]


def _cured(
    cure: Cure, changes: _Changes, plan: Plan, facts: Facts, verdict: Verdict
) -> Proposal | None:
    """Change one cycle after another until none is left, or a change leaves no less stuck."""
    steps: list[str] = []
    for _ in range(sum(map(len, plan))):
        best: tuple[int, _Change, Verdict] | None = None
        for change in changes(plan, facts, verdict):
            after = check(change.plan, change.facts)
            if best is None or len(after.stuck) < best[0]:
                best = len(after.stuck), change, after
            if after.ok:
                break
        if best is None or best[0] > len(verdict.stuck) or best[1].plan == plan:
            return None
        _, change, verdict = best
        plan, facts = change.plan, change.facts
        steps.append(change.step)
        if verdict.ok:
            return Proposal(cure, tuple(dict.fromkeys(steps)), tuple(plan), facts)
    return None


def _own_channel(plan: Plan, facts: Facts, verdict: Verdict) -> Iterator[_Change]:
    """Move the messages of one lane, or of one direction, or the broadcasts of a channel."""
    posts = [need.place for need in verdict.cycle if need.place.action.posts]
    sends = [place for place in posts if place.action.kind is Kind.SEND]
    for place in sends:
        rank, action = place.rank, place.action
        tags = {
            other.tag
            for other in _actions(plan[rank])
            if other.kind is Kind.SEND
            and (other.channel, other.peer) == (action.channel, action.peer)
        }
        if len(tags) > 1:
            yield _moved(plan, facts, action.channel, rank, action.peer, action.tag)
        yield _moved(plan, facts, action.channel, rank, action.peer, None)
    for place in posts:
        if place.action.kind is Kind.BROADCAST:
            channel, source = place.action.channel, place.action.peer
            new = _fresh(plan, f"{channel}:broadcast {source}")
            yield _rechannelled(
                plan, facts, channel, new,
                lambda _, action, source=source: (  # type: ignore[misc]
                    action.kind is Kind.BROADCAST and action.peer == source
                ),
                f"give the broadcasts of rank {source} on channel {channel!r} a channel of their "
                "own",
            )  # fmt: skip


def _moved(plan: Plan, facts: Facts, channel: str, src: int, dst: int, tag: int | None) -> _Change:
    def moves(rank: int, action: Action) -> bool:
        if tag is not None and action.tag != tag:
            return False
        if action.kind is Kind.SEND:
            return (rank, action.peer) == (src, dst)
        return action.kind is Kind.RECV and (action.peer, rank) == (src, dst)

    which = "" if tag is None else f" of tag {tag}"
    new = _fresh(plan, f"{channel}:{src} to {dst}")
    return _rechannelled(
        plan, facts, channel, new, moves,
        f"give the messages{which} from rank {src} to rank {dst} on channel {channel!r} a "
        "channel of their own",
    )  # fmt: skip


def _rechannelled(
    plan: Plan, facts: Facts, channel: str, new: str, moves: Callable[[int, Action], bool],
    step: str,
) -> _Change:  # fmt: skip
    def moved(rank: int, action: Action) -> Action:
        if action.posts and action.channel == channel and moves(rank, action):
            return replace(action, channel=new)
        return action

    changed: Plan = [
        tuple(
            tuple(moved(rank, action) for action in entry)
            if isinstance(entry, tuple)
            else moved(rank, entry)
            for entry in schedule
        )
        for rank, schedule in enumerate(plan)
    ]
    if isinstance(facts, Mapping):
        facts = {**facts, new: facts[channel]}
    return _Change(step, changed, facts)


def _fresh(plan: Plan, name: str) -> str:
    used = {action.channel for schedule in plan for action in _actions(schedule)}
    while name in used:
        name += "'"
    return name


def _batch(plan: Plan, facts: Facts, verdict: Verdict) -> Iterator[_Change]:
    """On every rank of the cycle, post the operations of the cycle as one group."""
    changed = list(plan)
    names: list[str] = []
    for rank, places in _by_rank(verdict).items():
        schedule = list(plan[rank])
        first = min(place.index for place in places)
        last = max(place.index for place in places)
        group = _actions(schedule[first : last + 1])
        if first == last or not all(a.posts and not a.blocking for a in group):
            continue
        schedule[first : last + 1] = [tuple(group)]
        changed[rank] = tuple(schedule)
        names.append(f"rank {rank} posts {_listed(group)} as one group")
    if names:
        yield _Change("; ".join(names), changed, facts)


def _receive_first(plan: Plan, facts: Facts, verdict: Verdict) -> Iterator[_Change]:
    """On odd ranks, or else on one rank of the cycle, post its receive before its send."""
    moves = []
    for rank, places in _by_rank(verdict).items():
        receives = [p.index for p in places if p.action.kind is Kind.RECV]
        others = [p.index for p in places if p.action.kind is not Kind.RECV]
        if receives and others and max(receives) > min(others):
            moves.append((rank, max(receives), min(others)))
    odd = [move for move in moves if move[0] % 2]
    choices = [odd] if odd else []
    choices += [[move] for move in moves]
    for choice in choices:
        changed = list(plan)
        steps = []
        for rank, source, target in choice:
            schedule = list(plan[rank])
            entry = schedule.pop(source)
            schedule.insert(target, entry)
            changed[rank] = tuple(schedule)
            passed = _actions(plan[rank][target:source])
            caveat = ", if it can without what it waits for now"
            steps.append(
                f"rank {rank} posts {_named(entry)} before {_named(plan[rank][target])}"
                f"{caveat if any(a.kind is Kind.WAIT for a in passed) else ''}"
            )
        yield _Change("; ".join(steps), changed, facts)


def _wait_later(plan: Plan, facts: Facts, verdict: Verdict) -> Iterator[_Change]:
    """Let a call that holds up its rank go on, and wait after the rest of the cycle is posted."""
    for rank, places in _by_rank(verdict).items():
        last = max(place.index for place in places)
        schedule = plan[rank]
        for place in places:
            action, index = place.action, place.index
            if action.kind is Kind.WAIT:
                held = _posted(schedule[:index], action.target)
                entries = [*schedule[:index], *schedule[index + 1 : last + 1], action]
            elif action.posts and action.blocking:
                held = replace(action, blocking=False)
                later = wait(action.name, stream=action.stream)
                entries = [*schedule[:index], held, *schedule[index + 1 : last + 1], later]
            else:
                continue
            changed = list(plan)
            changed[rank] = (*entries, *schedule[last + 1 :])
            caveat = ", if that does not need it" if held.kind is Kind.RECV else ""
            yield _Change(
                f"rank {rank} waits for {held.name!r} only after {_named(schedule[last])}{caveat}",
                changed,
                facts,
            )


def _posted(entries: Schedule, name: str) -> Action:
    found = [action for action in _actions(entries) if action.posts and action.name == name]
    return found[-1]


def _actions(schedule: Schedule) -> list[Action]:
    return [a for entry in schedule for a in (entry if isinstance(entry, tuple) else (entry,))]


def _by_rank(verdict: Verdict) -> dict[int, list[Place]]:
    places: dict[int, list[Place]] = {}
    for need in verdict.cycle:
        places.setdefault(need.place.rank, []).append(need.place)
    return places


def _named(entry: Action | Group) -> str:
    return _listed(entry) if isinstance(entry, tuple) else repr(entry.name)


def _listed(group: Sequence[Action]) -> str:
    return " and ".join(repr(action.name) for action in group)


_CHANGES: dict[Cure, _Changes] = {
    Cure.CHANNEL: _own_channel,
    Cure.BATCH: _batch,
    Cure.RECEIVE_FIRST: _receive_first,
    Cure.WAIT_LATER: _wait_later,
}
