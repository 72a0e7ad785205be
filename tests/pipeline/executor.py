"""Runs schedules one small step after another: the oracle of the schedule check.

It shares nothing with the check but the lists of calls and the facts.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence

from commlayer_testkit.schedule.check import Action, Facts, Kind, Schedule

from commlayer.semantics import OperationSemantics, Order, PostMayBlock, Semantics, WaitBlocks


class Op:
    def __init__(self, rank: int, action: Action, facts: OperationSemantics) -> None:
        self.rank = rank
        self.action = action
        self.facts = facts
        self.started = self.complete = False
        self.after: list[Op] = []
        self.others: list[Op] = []
        self.turn = 0
        size = action.nbytes
        self.eager = size is not None and size <= facts.eager_bytes

    def is_complete(self) -> bool:
        return self.complete


class Rank:
    def __init__(self, schedule: Schedule) -> None:
        self.todo = list(schedule)
        self.blocked_on: list[Callable[[], bool]] = []
        self.named: dict[str, Op] = {}
        self.streams: dict[str, list[Op]] = defaultdict(list)
        self.channels: dict[str, list[list[Op]]] = defaultdict(list)
        self.outstanding: dict[tuple[object, ...], list[Op]] = defaultdict(list)


class Executor:
    def __init__(self, schedules: Sequence[Schedule], facts: Facts) -> None:
        self.facts = facts
        self.ranks = [Rank(schedule) for schedule in schedules]
        self.ops: list[Op] = []
        self.lanes: dict[tuple[object, ...], list[Op]] = defaultdict(list)
        self.used: set[tuple[str, int, int | None]] = set()

    def run(self, seed: int) -> bool:
        """Whether every call returned and every operation completed, in an order by chance."""
        choose = random.Random(seed)
        while True:
            moves = [self.host(rank) for rank in range(len(self.ranks))]
            possible = [move for move in moves if move is not None]
            possible += [move for op in self.ops if (move := self.transport(op)) is not None]
            if not possible:
                break
            choose.choice(possible)()
        return not any(r.todo or r.blocked_on for r in self.ranks) and all(
            op.complete for op in self.ops
        )

    def semantics(self, channel: str) -> Semantics:
        return self.facts if isinstance(self.facts, Semantics) else self.facts[channel]

    def host(self, number: int):  # type: ignore[no-untyped-def]
        rank = self.ranks[number]
        if not all(free() for free in rank.blocked_on):
            return None
        if not rank.todo:
            if rank.blocked_on:
                return rank.blocked_on.clear
            return None
        return lambda: self.call(number, rank)

    def call(self, number: int, rank: Rank) -> None:
        rank.blocked_on.clear()
        entry = rank.todo.pop(0)
        if isinstance(entry, tuple):
            made = [self.prepare(number, action) for action in entry]
            for op in made:
                self.post(rank, op)
            for channel in {op.action.channel for op in made}:
                rank.channels[channel].append([o for o in made if o.action.channel == channel])
        elif entry.posts:
            op = self.prepare(number, entry)
            self.post(rank, op)
            rank.channels[entry.channel].append([op])
            if entry.blocking:
                self.wait(rank, op, entry.stream)
        elif entry.kind is Kind.WAIT:
            self.wait(rank, rank.named[entry.target], entry.stream)
        elif entry.kind is Kind.SYNCHRONIZE:
            rank.blocked_on += [op.is_complete for op in rank.streams[entry.stream]]
        elif entry.kind is Kind.FOLLOW:
            rank.streams[entry.stream] += rank.streams[entry.target]

    def wait(self, rank: Rank, op: Op, stream: str) -> None:
        if op.facts.wait_blocks is WaitBlocks.STREAM:
            rank.streams[stream].append(op)
        else:
            rank.blocked_on.append(op.is_complete)

    def prepare(self, number: int, action: Action) -> Op:
        semantics = self.semantics(action.channel)
        facts = semantics.collective if action.kind is Kind.BROADCAST else semantics.p2p
        return Op(number, action, facts)

    def post(self, rank: Rank, op: Op) -> None:
        action, facts = op.action, op.facts
        if facts.wait_blocks is WaitBlocks.STREAM:
            op.after += rank.streams[action.stream]
        if facts.order is Order.IN_ORDER_STREAM:
            for unit in rank.channels[action.channel]:
                op.after += [o for o in unit if o.facts.order is Order.IN_ORDER_STREAM]
        window = facts.max_outstanding_per_pair
        if window:
            before = rank.outstanding[action.channel, action.kind, action.peer]
            if len(before) >= window:
                op.after += before[: len(before) - window + 1]
            before.append(op)
        if facts.post_may_block is PostMayBlock.ALWAYS and action.kind is not Kind.RECV:
            rank.blocked_on.append(op.is_complete)
        if facts.post_may_block is not PostMayBlock.NEVER:
            self.connect(rank, op)
        self.used.add((action.channel, op.rank, self.peer(action)))
        rank.named[action.name] = op
        self.ops.append(op)
        self.match(op)

    def peer(self, action: Action) -> int | None:
        return None if action.kind is Kind.BROADCAST else action.peer

    def connect(self, rank: Rank, op: Op) -> None:
        channel, peer = op.action.channel, self.peer(op.action)
        if (channel, op.rank, peer) in self.used:
            return
        if peer is None:
            needed = {(channel, r, None) for r in range(len(self.ranks))}
        else:
            needed = {(channel, peer, op.rank)}
        rank.blocked_on.append(lambda: needed <= self.used)

    def match(self, op: Op) -> None:
        action, rank = op.action, op.rank
        tag = action.tag if self.semantics(action.channel).tags else 0
        if action.kind is Kind.BROADCAST:
            mine = self.lanes["broadcast", action.channel, rank]
            mine.append(op)
            op.turn = len(mine)
            return
        ends = (rank, action.peer) if action.kind is Kind.SEND else (action.peer, rank)
        mine = self.lanes[action.kind, action.channel, ends, tag]
        other = Kind.RECV if action.kind is Kind.SEND else Kind.SEND
        theirs = self.lanes[other, action.channel, ends, tag]
        mine.append(op)
        if len(theirs) >= len(mine):
            partner = theirs[len(mine) - 1]
            op.others, partner.others = [partner], [op]

    def transport(self, op: Op):  # type: ignore[no-untyped-def]
        if not op.started:
            if all(other.complete for other in op.after):
                return lambda: setattr(op, "started", True)
            return None
        if op.complete or not self.served(op):
            return None
        return lambda: setattr(op, "complete", True)

    def served(self, op: Op) -> bool:
        if op.action.kind is Kind.SEND:
            return op.eager or any(other.started for other in op.others)
        if op.action.kind is Kind.RECV:
            return any(other.started for other in op.others)
        turns = [self.lanes["broadcast", op.action.channel, r] for r in range(len(self.ranks))]
        group = {t[op.turn - 1].rank: t[op.turn - 1] for t in turns if len(t) >= op.turn}
        source = group.get(op.action.peer)
        if source is not None and source.eager and source.action.peer == source.rank:
            return source.started
        return (
            len(group) == len(self.ranks)
            and all(member.action.peer == op.action.peer for member in group.values())
            and all(member.started for member in group.values())
        )
