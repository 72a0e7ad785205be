"""Which schedule comes next.

`DepthFirst` walks the tree of choices.  Without a bound it prunes: a branch is
taken only where a later step races with the one taken there (Flanagan and
Godefroid, "Dynamic partial-order reduction", 2005), and never where it repeats
an explored order of commuting steps (sleep sets, Godefroid 1996).  What a step
touches is known once it has run.  With a bound nothing is pruned, since a pruned
schedule may stand for one within the bound.  The bound counts preemptions
(switches away from an actor that could go on), or every deviation from the
default schedule (Emmi et al., "Delay-bounded scheduling", 2011), which also
counts the choice of who goes next when the last one blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from commlayer_testkit.sim.choices import Choices, PriorityChoices, Pruned, RandomChoices
from commlayer_testkit.sim.world import Actor


class Search:
    """A source of schedules.  `bound` says in words what it covers."""

    bound = ""

    def next(self) -> Choices | None:
        """The choices of the next run; ``None`` when everything was covered."""
        raise NotImplementedError

    def done(self, length: int) -> None:
        """The last run made `length` choices."""


class Sampling(Search):
    """Random walks, or random priorities (``pct``), from a seed on."""

    def __init__(self, strategy: str, seed: int) -> None:
        self._seed = seed
        self._pct = strategy == "pct"
        self._length = 64
        self.bound = f"sampled from seed {seed}"

    def next(self) -> Choices:
        self._seed += 1
        if self._pct:
            return PriorityChoices(self._seed, length=self._length)
        return RandomChoices(self._seed)

    def done(self, length: int) -> None:
        self._length = max(length, 1)


class _Node:
    """A choice on the current path.  `actors` is empty for a choice of behaviour."""

    __slots__ = ("actors", "choice", "costs", "footprint", "options", "sleep", "spent", "wanted")

    def __init__(self, options: int) -> None:
        self.options = options
        self.choice = 0
        self.actors: list[int] = []
        self.wanted: set[int] = set()
        self.sleep: dict[int, tuple[int, int]] = {}
        self.footprint = (-1, 0)
        self.costs = False
        self.spent = 0


class DepthFirst(Search):
    """The tree of choices, one path at a time."""

    def __init__(self, *, preemptions: int | None = None, deviations: int | None = None) -> None:
        if preemptions is not None and deviations is not None:
            raise ValueError("bound preemptions or deviations, not both")
        self._limit = deviations if preemptions is None else preemptions
        self._counts_all = deviations is not None
        self.path: list[_Node] = []
        self._started = False
        self.bound = "every schedule up to commuting steps"
        if self._limit is not None:
            what = "deviations from the default schedule" if self._counts_all else "preemptions"
            self.bound = f"every schedule of at most {self._limit} {what}"

    def next(self) -> Choices | None:
        if self._started and not self._advance():
            return None
        self._started = True
        if self._limit is None:
            return _Reducing(self.path)
        return _Bounded(self.path, self._counts_all)

    def _advance(self) -> bool:
        while self.path:
            node = self.path[-1]
            choice = self._following(node)
            if choice is not None:
                node.choice = choice
                return True
            self.path.pop()
        return False

    def _following(self, node: _Node) -> int | None:
        if self._limit is None and node.actors:
            node.sleep[node.actors[node.choice]] = node.footprint
            for choice, actor in enumerate(node.actors):
                if actor in node.wanted and actor not in node.sleep:
                    return choice
            return None
        spent = self._limit is not None and node.costs and node.spent >= self._limit
        return node.choice + 1 if node.choice + 1 < node.options and not spent else None


class _Path(Choices):
    """One run along the search's path, extending it by first options."""

    def __init__(self, path: list[_Node]) -> None:
        super().__init__()
        self._path = path
        self._depth = 0

    def pick(self, options: int) -> int:
        if self._depth == len(self._path):
            self._path.append(_Node(options))
        node = self._path[self._depth]
        self._depth += 1
        return node.choice


class _Bounded(_Path):
    """Counts preemptions, or every choice that is not the default one."""

    def __init__(self, path: list[_Node], counts_all: bool) -> None:
        super().__init__(path)
        self._counts_all = counts_all
        self._spent = 0

    def schedule(self, enabled: Sequence[Actor], continues: bool) -> int:
        if len(enabled) == 1:
            return 0
        if self._depth == len(self._path):
            node = _Node(len(enabled))
            node.costs = self._counts_all or continues
            node.spent = self._spent
            self._path.append(node)
        node = self._path[self._depth]
        self._depth += 1
        self._spent += bool(node.choice and node.costs)
        self.taken.append(node.choice)
        return node.choice

    def pick(self, options: int) -> int:
        fresh = self._depth == len(self._path)
        choice = super().pick(options)
        node = self._path[self._depth - 1]
        if fresh:
            node.costs, node.spent = self._counts_all, self._spent
        self._spent += bool(choice and node.costs)
        return choice


class _Reducing(_Path):
    """Keeps the happens-before order of the run and asks for branches where steps race.

    Steps are numbered; a set of steps is an integer's bits.
    """

    follows = True

    def __init__(self, path: list[_Node]) -> None:
        super().__init__(path)
        self._sleep: dict[int, tuple[int, int]] = {}
        self._steps: list[tuple[int, int, int, _Node | None]] = []
        self._before: list[int] = []
        self._latest: dict[int, int] = {}
        self._enabled: set[int] = set()
        self._node: _Node | None = None
        self._actor = -1
        self._barrier = 0

    def schedule(self, enabled: Sequence[Actor], continues: bool) -> int:
        self._note_enabled({actor.index for actor in enabled})
        if len(enabled) == 1:
            self._node = None
            self._actor = enabled[0].index
            if self._actor in self._sleep:
                raise Pruned
            return 0
        if self._depth == len(self._path):
            self._extend(enabled)
        node = self._node = self._path[self._depth]
        self._depth += 1
        self._sleep = node.sleep
        self._actor = node.actors[node.choice]
        self.taken.append(node.choice)
        return node.choice

    def _extend(self, enabled: Sequence[Actor]) -> None:
        node = _Node(len(enabled))
        node.actors = [actor.index for actor in enabled]
        node.sleep = dict(self._sleep)
        awake = [at for at, actor in enumerate(node.actors) if actor not in node.sleep]
        if not awake:
            raise Pruned
        node.choice = awake[0]
        node.wanted.add(node.actors[node.choice])
        self._path.append(node)

    def _note_enabled(self, enabled: set[int]) -> None:
        """A step happens after the one that enabled it; one that was disabled races with that."""
        if self._steps:
            last = len(self._steps) - 1
            for actor in enabled - self._enabled:
                self._latest[actor] = self._latest.get(actor, 0) | self._before[last] | 1 << last
            node = self._steps[last][3]
            if node is not None:
                node.wanted.update(self._enabled - enabled - {self._actor})
        self._enabled = enabled

    def ticked(self) -> None:
        self._barrier = (1 << len(self._steps)) - 1
        self._enabled = set()

    def followed(self, writes: int, reads: int) -> None:
        both = writes | reads
        if self._node is not None:
            self._node.footprint = (writes, reads)
        if self._sleep:
            self._sleep = {
                actor: (w, r)
                for actor, (w, r) in self._sleep.items()
                if not (w & both or r & writes)
            }
        actor, steps = self._actor, self._steps
        order = before = self._latest.get(actor, 0) | self._barrier
        raced = False
        for at in range(len(steps) - 1, -1, -1):
            if before >> at & 1:
                continue
            other, w, r, node = steps[at]
            if other != actor and not (w & both or r & writes):
                continue
            before |= self._before[at] | 1 << at
            if not raced and other != actor:
                raced = True
                if node is not None:
                    self._want(node, actor, at, order)
        self._before.append(before)
        steps.append((actor, writes, reads, self._node))
        self._latest[actor] = before | 1 << (len(steps) - 1)

    def _want(self, node: _Node, actor: int, at: int, order: int) -> None:
        """Ask for a branch at `node`, before step `at`, that lets `actor` come first."""
        if actor in node.actors:
            node.wanted.add(actor)
            return
        for later in range(at + 1, len(self._steps)):
            if order >> later & 1 and self._steps[later][0] in node.actors:
                node.wanted.add(self._steps[later][0])
                return
        node.wanted.update(node.actors)
