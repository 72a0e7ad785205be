"""The schedule check: can these ranks deadlock?  Said from their lists of calls, without running.

Every list is turned into events (an operation is called, starts, is complete; a
call returns) and what each of them needs.  An event needs *all* its
prerequisites and messages match in the order posted, so no event can be raced:
what can never happen is the same for every timing.  The ranks can deadlock if
and only if events need each other in a circle, and the check is exact for what it
models.  Where a fact leaves the transport a choice (a post *may* block) the worse
one is taken: the verdict is that the ranks *can* deadlock.

What is modelled: rendezvous and eager sends, posts that may block (always, or when
a pair of ranks first uses a channel, which the worse choice includes), one in-order
stream a communicator (the channels of a schedule are communicators), order per
peer and tag, limits on outstanding operations, waits of the host and waits of
streams, groups of operations that start together.

What is not:

- one thread a rank calls the transport, in the order of the list; calls that
  the library moves to its own drivers are to be listed as those drivers make them;
- a transport that moves nothing outside calls (``progress = ONLY_IN_CALLS``) is
  taken to have somebody who calls it;
- messages that may overtake each other (``order = UNORDERED``) are taken to
  match in order, as they do with one outstanding per pair;
- a broadcast is the transport's own, and ends only when every rank has entered
  it, or with its source's if that is eager; one that is made of sends is to be
  listed as sends;
- a limit on outstanding operations is a window that moves in order;
- operations of one group are taken to run at once, whatever their order in it;
- an operation of a transport whose waits hold the host does not wait for a
  stream: what it sends was computed, by a `synchronize` in the list;
- sizes, data types and contents are not compared, and nothing is known of what
  a message is computed from.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from commlayer.semantics import OperationSemantics, Order, PostMayBlock, Semantics, WaitBlocks


class Kind(str, Enum):
    """What a rank does next."""

    SEND = "send"
    RECV = "receive"
    BROADCAST = "broadcast"
    WAIT = "wait"
    """Wait for an operation of this rank: the host, or the stream where waits are its."""
    WORK = "work"
    """Compute; it always ends."""
    SYNCHRONIZE = "synchronize"
    """The host waits for a stream."""
    FOLLOW = "follow"
    """A stream waits for what another has been given so far."""


@dataclass(frozen=True)
class Action:
    """One call of a rank; made by the functions `send`, `recv`, `broadcast`, `wait` and so on."""

    kind: Kind
    name: str
    peer: int = -1
    """The other rank; for a broadcast its source."""
    channel: str = "data"
    tag: int = 0
    nbytes: int | None = None
    """Size of the message; ``None`` is larger than any eager limit."""
    blocking: bool = False
    """Whether the operation is waited where it is posted."""
    stream: str = "main"
    """The current stream of the call."""
    target: str = ""
    """What is waited: the name of an operation, or a stream."""

    @property
    def posts(self) -> bool:
        """Whether it posts an operation on a channel."""
        return self.kind in (Kind.SEND, Kind.RECV, Kind.BROADCAST)


def send(
    dst: int, name: str = "", *, channel: str = "data", tag: int = 0, nbytes: int | None = None,
    blocking: bool = False, stream: str = "main",
) -> Action:  # fmt: skip
    """Post a send to rank `dst`; `name` is what waits and reports call it."""
    name = name or f"send to rank {dst}"
    return Action(Kind.SEND, name, dst, channel, tag, nbytes, blocking, stream)


def recv(
    src: int, name: str = "", *, channel: str = "data", tag: int = 0,
    blocking: bool = False, stream: str = "main",
) -> Action:  # fmt: skip
    """Post a receive from rank `src`."""
    name = name or f"receive from rank {src}"
    return Action(Kind.RECV, name, src, channel, tag, None, blocking, stream)


def broadcast(
    src: int, name: str = "", *, channel: str = "broadcast", nbytes: int | None = None,
    blocking: bool = False, stream: str = "main",
) -> Action:  # fmt: skip
    """Post this rank's part of a broadcast that every rank enters."""
    name = name or f"broadcast from rank {src}"
    return Action(Kind.BROADCAST, name, src, channel, 0, nbytes, blocking, stream)


def wait(operation: str, *, stream: str = "main") -> Action:
    """Wait for the operation last posted under the name `operation`."""
    return Action(Kind.WAIT, f"wait for {operation}", stream=stream, target=operation)


def work(name: str = "work", *, stream: str = "main") -> Action:
    """Compute."""
    return Action(Kind.WORK, name, stream=stream)


def synchronize(stream: str = "main") -> Action:
    """Hold the host until `stream` is done with what it was given."""
    return Action(Kind.SYNCHRONIZE, f"synchronize {stream}", stream=stream)


def follow(stream: str, after: str) -> Action:
    """Let `stream` wait for what `after` was given so far (``wait_stream``)."""
    return Action(Kind.FOLLOW, f"{stream} follows {after}", stream=stream, target=after)


Group = tuple[Action, ...]
"""Operations posted by one group call, which start together (``batch_isend_irecv``)."""

Schedule = Sequence[Action | Group]
"""What one rank calls, in order."""

Facts = Semantics | Mapping[str, Semantics]
"""Of every channel, or channel by channel."""


@dataclass(frozen=True)
class Place:
    """An action of one rank.  `index` counts the entries of its schedule; a group is one."""

    rank: int
    index: int
    action: Action

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.action.name}"
        if self.action.posts:
            text += f" ({self.action.kind.value}, channel {self.action.channel})"
        return text


@dataclass(frozen=True)
class Need:
    """`place` cannot go on; `why` is to be read before the place of the next need."""

    place: Place
    why: str


@dataclass(frozen=True)
class Verdict:
    """What the check says.

    `ok`: every call returns, every operation completes and every message is
    received.  `cycle`: actions each of which needs the next, and the last the
    first; empty if there is none.  `unmatched`: operations that no other rank has
    the counterpart of.  `stuck`: all actions that never complete or return.
    """

    cycle: tuple[Need, ...] = ()
    unmatched: tuple[Place, ...] = ()
    stuck: tuple[Place, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.cycle and not self.unmatched

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the cycle's actions, in its order."""
        return tuple(need.place.action.name for need in self.cycle)

    def __str__(self) -> str:
        if self.ok:
            return "no deadlock: every call returns and every operation completes"
        lines = []
        if self.cycle:
            lines.append("can deadlock:")
            lines += [f"  {need.place}\n    {need.why}" for need in self.cycle]
            lines.append(f"  {self.cycle[0].place}")
        lines += [f"no other rank has the counterpart of {place}" for place in self.unmatched]
        return "\n".join(lines)


def check(schedules: Sequence[Schedule], facts: Facts) -> Verdict:
    """Whether ranks that call what `schedules` lists (one a rank) can deadlock.

    Raises ``ValueError`` for a schedule that no rank could call: a peer that is
    not another rank, a wait for what was not posted, a group of other things
    than operations, a channel without facts.
    """
    events = _Events(schedules, facts)
    stuck = events.never()
    places = {event.place: None for event in stuck if event.place.action.posts or event.is_return}
    return Verdict(_shortest_cycle(stuck), tuple(events.unmatched), tuple(places))


class _Phase(Enum):
    CALLED = 0
    STARTED = 1
    COMPLETE = 2
    RETURNED = 3


@dataclass(eq=False)
class _Event:
    """Something that happens at most once, after all it `needs`, each with the reason."""

    place: Place
    phase: _Phase
    needs: list[tuple[_Event, str]] = field(default_factory=list)
    impossible: bool = False

    @property
    def is_return(self) -> bool:
        return self.phase is _Phase.RETURNED

    def need(self, others: Iterable[_Event], why: str = "") -> None:
        self.needs.extend((other, why) for other in others if other is not self)


class _Node:
    """The events of one action."""

    def __init__(self, place: Place, facts: OperationSemantics | None) -> None:
        self.place = place
        self.action = place.action
        self.facts = facts
        self.connects = False
        """Whether it is the first operation with its peer on its channel, and that may block."""
        self.called = _Event(place, _Phase.CALLED)
        self.started = _Event(place, _Phase.STARTED)
        self.complete = _Event(place, _Phase.COMPLETE)
        self.returned = _Event(place, _Phase.RETURNED)
        self.returned.need([self.called])

    @property
    def eager(self) -> bool:
        nbytes = self.action.nbytes
        return self.facts is not None and nbytes is not None and nbytes <= self.facts.eager_bytes

    def events(self) -> tuple[_Event, ...]:
        if self.action.posts:
            return self.called, self.started, self.complete, self.returned
        return self.called, self.returned


class _Events:
    """The events of all ranks and what each needs."""

    def __init__(self, schedules: Sequence[Schedule], facts: Facts) -> None:
        self._size = len(schedules)
        self._facts = facts
        self._nodes: list[_Node] = []
        self.unmatched: list[Place] = []
        for rank, schedule in enumerate(schedules):
            self._call_in_order(rank, schedule)
        self._match()

    def never(self) -> list[_Event]:
        """The events that cannot happen."""
        events = [event for node in self._nodes for event in node.events()]
        followers: dict[int, list[_Event]] = defaultdict(list)
        missing = {}
        for event in events:
            missing[id(event)] = len(event.needs) + event.impossible
            for other, _ in event.needs:
                followers[id(other)].append(event)
        happening = deque(event for event in events if not missing[id(event)])
        while happening:
            for event in followers[id(happening.popleft())]:
                missing[id(event)] -= 1
                if not missing[id(event)]:
                    happening.append(event)
        return [event for event in events if missing[id(event)]]

    def _semantics(self, channel: str) -> Semantics:
        if isinstance(self._facts, Semantics):
            return self._facts
        try:
            return self._facts[channel]
        except KeyError:
            raise ValueError(f"no facts are given for channel {channel!r}") from None

    def _facts_of(self, action: Action) -> OperationSemantics | None:
        if not action.posts:
            return None
        semantics = self._semantics(action.channel)
        return semantics.collective if action.kind is Kind.BROADCAST else semantics.p2p

    def _call_in_order(self, rank: int, schedule: Schedule) -> None:
        caller = _Caller()
        for index, entry in enumerate(schedule):
            group = entry if isinstance(entry, tuple) else (entry,)
            nodes = []
            for action in group:
                self._check(rank, action, grouped=isinstance(entry, tuple))
                nodes.append(_Node(Place(rank, index, action), self._facts_of(action)))
            caller.call(nodes)
            self._nodes += nodes

    def _check(self, rank: int, action: Action, *, grouped: bool) -> None:
        where = f"rank {rank}: {action.name}"
        if grouped and (not action.posts or action.blocking):
            raise ValueError(f"{where}: a group holds operations that are posted only")
        if action.posts:
            if not 0 <= action.peer < self._size:
                raise ValueError(f"{where}: rank {action.peer} is not one of {self._size}")
            if action.peer == rank and action.kind is not Kind.BROADCAST:
                raise ValueError(f"{where}: a rank does not send to itself")

    def _match(self) -> None:
        messages = [n for n in self._nodes if n.action.kind in (Kind.SEND, Kind.RECV)]
        rounds = self._rounds()
        self._match_messages(messages)
        for turns in rounds:
            self._match_broadcasts(turns)
        self._connect_pairs(messages)
        for turns in rounds:
            entered = [turn[0] if turn else None for turn in turns]
            for entry in filter(None, entered):
                self._connect(entry, entered)

    def _rounds(self) -> list[list[list[_Node]]]:
        """The broadcasts of each channel, by rank."""
        rounds: dict[str, list[list[_Node]]] = {}
        for node in self._nodes:
            if node.action.kind is Kind.BROADCAST:
                turns = rounds.setdefault(node.action.channel, [[] for _ in range(self._size)])
                turns[node.place.rank].append(node)
        return list(rounds.values())

    def _match_messages(self, messages: Sequence[_Node]) -> None:
        sends: dict[tuple[object, ...], list[_Node]] = defaultdict(list)
        receives: dict[tuple[object, ...], list[_Node]] = defaultdict(list)
        for node in messages:
            action, rank = node.action, node.place.rank
            tag = action.tag if self._semantics(action.channel).tags else 0
            if action.kind is Kind.SEND:
                sends[action.channel, rank, action.peer, tag].append(node)
            else:
                receives[action.channel, action.peer, rank, tag].append(node)
        for lane in {**sends, **receives}:
            outgoing, incoming = sends[lane], receives[lane]
            both = min(len(outgoing), len(incoming))
            for source, target in zip(outgoing[:both], incoming[:both], strict=True):
                target.complete.need([source.started], "needs")
                if not source.eager:
                    source.complete.need([target.started], "needs")
            self._has_no_counterpart(outgoing[both:] + incoming[both:])

    def _connect_pairs(self, messages: Sequence[_Node]) -> None:
        first: dict[tuple[str, int, int], _Node] = {}
        for node in messages:
            action = node.action
            first.setdefault((action.channel, node.place.rank, action.peer), node)
        for (channel, rank, peer), node in first.items():
            self._connect(node, [first.get((channel, peer, rank))])

    @staticmethod
    def _connect(node: _Node, others: Iterable[_Node | None]) -> None:
        """The return of a post that connects its ranks needs the first post of each."""
        if node.connects:
            for other in others:
                if other is None:
                    node.returned.impossible = True
                elif other is not node:
                    node.returned.need([other.called], "connects to the rank of")

    def _match_broadcasts(self, turns: list[list[_Node]]) -> None:
        for number in range(max(map(len, turns))):
            nodes = {turn[number].place.rank: turn[number] for turn in turns if number < len(turn)}
            whole = len(nodes) == self._size
            whole &= len({node.action.peer for node in nodes.values()}) == 1
            for node in nodes.values():
                source = nodes.get(node.action.peer)
                if source is not None and source.eager and source.action.peer == node.action.peer:
                    if node is not source:
                        node.complete.need([source.started], "needs")
                elif whole:
                    others = (other for other in nodes.values() if other is not node)
                    node.complete.need((other.started for other in others), "needs")
                else:
                    node.complete.impossible = True
            if not whole:
                self.unmatched += [node.place for node in nodes.values()]

    def _has_no_counterpart(self, nodes: Iterable[_Node]) -> None:
        for node in nodes:
            self.unmatched.append(node.place)
            node.complete.impossible = not (node.eager and node.action.kind is Kind.SEND)


class _Caller:
    """One rank's thread: its place in the list, its streams and its queues."""

    def __init__(self) -> None:
        self._posted: dict[str, _Node] = {}
        self._gate: list[_Event] = []
        """What must return before the next call."""
        self._streams: dict[str, dict[_Node, None]] = defaultdict(dict)
        """The operations that a stream waits for."""
        self._queues: dict[str, list[_Node]] = {}
        """What was last put on the in-order stream of a channel."""
        self._outstanding: dict[tuple[object, ...], list[_Node]] = defaultdict(list)
        self._connected: set[tuple[object, ...]] = set()

    def call(self, nodes: Sequence[_Node]) -> None:
        """Call one entry of the schedule: an action, or the operations of a group."""
        for node in nodes:
            node.called.need(self._gate, "is called only after the return of")
        holding: list[_Event] = []
        for node in nodes:
            if node.action.posts:
                holding += self._post(node)
            else:
                holding += self._other(node)
        queued: dict[str, list[_Node]] = defaultdict(list)
        for node in nodes:
            if node.facts is not None and node.facts.order is Order.IN_ORDER_STREAM:
                queued[node.action.channel].append(node)
            if node.action.posts:
                self._posted[node.action.name] = node
        self._queues.update(queued)
        if holding:
            self._gate = holding

    def _post(self, node: _Node) -> list[_Event]:
        action, facts = node.action, node.facts
        assert facts is not None
        node.started.need([node.called])
        node.complete.need([node.started])
        if facts.wait_blocks is WaitBlocks.STREAM:
            for other in self._streams[action.stream]:
                node.started.need([other.complete], f"runs after what stream {action.stream} "
                                  "waits for:")  # fmt: skip
        if facts.order is Order.IN_ORDER_STREAM:
            for other in self._queues.get(action.channel, ()):
                node.started.need([other.complete], "is on the in-order stream behind")
        if facts.max_outstanding_per_pair:
            before = self._outstanding[action.channel, action.kind, action.peer]
            if len(before) >= facts.max_outstanding_per_pair:
                other = before[-facts.max_outstanding_per_pair]
                node.started.need([other.complete], "may be outstanding only after")
            before.append(node)
        holds = node.connects = self._connects(node)
        if facts.post_may_block is PostMayBlock.ALWAYS and action.kind is not Kind.RECV:
            node.returned.need([node.complete])
            holds = True
        if action.blocking:
            holds |= self._wait(node, node)
        return [node.returned] if holds else []

    def _connects(self, node: _Node) -> bool:
        action, facts = node.action, node.facts
        assert facts is not None
        pair = action.channel, None if action.kind is Kind.BROADCAST else action.peer
        first = pair not in self._connected
        self._connected.add(pair)
        return first and facts.post_may_block is not PostMayBlock.NEVER

    def _other(self, node: _Node) -> list[_Event]:
        action = node.action
        stream = self._streams[action.stream]
        holds = False
        if action.kind is Kind.WAIT:
            target = self._posted.get(action.target)
            if target is None:
                raise ValueError(
                    f"rank {node.place.rank}: {action.name}: nothing of that name was posted"
                )
            holds = self._wait(node, target)
        elif action.kind is Kind.SYNCHRONIZE:
            holds = bool(stream)
            node.returned.need((other.complete for other in stream), "waits for")
        elif action.kind is Kind.FOLLOW:
            stream.update(self._streams[action.target])
        return [node.returned] if holds else []

    def _wait(self, node: _Node, target: _Node) -> bool:
        """Wait for `target` in the call `node`; whether that holds up the host."""
        assert target.facts is not None
        if target.facts.wait_blocks is WaitBlocks.STREAM:
            self._streams[node.action.stream][target] = None
            return False
        node.returned.need([target.complete], "waits for" if node is not target else "")
        return True


def _shortest_cycle(stuck: Sequence[_Event]) -> tuple[Need, ...]:
    """The circle of needs through the fewest actions, or nothing if there is none."""
    inside = {id(event) for event in stuck}

    def needs(event: _Event) -> Iterator[tuple[_Event, str]]:
        return ((other, why) for other, why in event.needs if id(other) in inside)

    best: list[tuple[_Event, str]] = []
    best_cost = 1 << 60
    for start in _circular(stuck, needs):
        found = _circle_through(start, needs, best_cost)
        if found is not None:
            best, best_cost = found
    steps = [Need(event.place, why) for event, why in best if why]
    if not steps:
        return ()
    first = min(range(len(steps)), key=lambda i: (steps[i].place.rank, steps[i].place.index))
    return tuple(steps[first:] + steps[:first])


def _circular(
    stuck: Sequence[_Event], needs: Callable[[_Event], Iterator[tuple[_Event, str]]]
) -> list[_Event]:
    """`stuck` without what no circle goes through: events that need none of it, repeatedly."""
    left = {id(event): event for event in stuck}
    while True:
        ends = [
            key
            for key, event in left.items()
            if not any(id(other) in left for other, _ in needs(event))
        ]
        if not ends:
            return list(left.values())
        for key in ends:
            del left[key]


def _circle_through(
    start: _Event, needs: Callable[[_Event], Iterator[tuple[_Event, str]]], limit: int
) -> tuple[list[tuple[_Event, str]], int] | None:
    """The cheapest way of needs from `start` back to it that costs less than `limit`.

    A need that leads to another action costs one.
    """
    ways: dict[int, tuple[_Event, str, _Event] | None] = {id(start): None}
    costs = {id(start): 0}
    front = deque([start])
    while front:
        event = front.popleft()
        for other, why in needs(event):
            cost = costs[id(event)] + (1 if why else 0)
            if cost >= limit:
                continue
            if other is start:
                way = [(event, why)]
                step = ways[id(event)]
                while step is not None:
                    way.append((step[0], step[1]))
                    step = ways[id(step[0])]
                return way[::-1], cost
            if cost < costs.get(id(other), limit):
                costs[id(other)] = cost
                ways[id(other)] = (event, why, other)
                if why:
                    front.append(other)
                else:
                    front.appendleft(other)
    return None
