"""Where the answers to "who runs next?" and "what does the transport do?" come from.

A run is a function of its scenario and its choices.  Choice 0 always means "go
on with the one that ran last" or "the ordinary behaviour", so that a short list
of deviations describes a schedule.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commlayer_testkit.sim.world import Actor


class Pruned(Exception):
    """The rest of this schedule is known to repeat an explored one."""


class Choices(ABC):
    """One run's source of choices.  `taken` records every choice among two or more."""

    follows = False
    """Whether `followed` wants to know what each step touched."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def followed(self, writes: int, reads: int) -> None:  # noqa: B027
        """The step that `schedule` chose has touched this."""

    def schedule(self, enabled: Sequence[Actor], continues: bool) -> int:
        """Index into `enabled`.  `continues`: entry 0 ran last and picking another preempts it."""
        if len(enabled) == 1:
            return 0
        choice = self.pick(len(enabled))
        self.taken.append(choice)
        return choice

    def value(self, options: int) -> int:
        """One of `options` behaviours of the simulated transport."""
        if options < 2:
            return 0
        choice = self.pick(options)
        self.taken.append(choice)
        return choice

    def ticked(self) -> None:  # noqa: B027
        """Nothing could run and the clock has jumped."""

    @abstractmethod
    def pick(self, options: int) -> int:
        """A number from 0 to ``options - 1``."""


class RandomChoices(Choices):
    """A random walk, fixed by its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed).random

    def pick(self, options: int) -> int:
        return int(self._random() * options)


class ReplayChoices(Choices):
    """The given choices, then zeros.  A choice out of range means its last option."""

    def __init__(self, choices: Sequence[int] = ()) -> None:
        super().__init__()
        self._given = choices

    def pick(self, options: int) -> int:
        at = len(self.taken)
        return min(self._given[at], options - 1) if at < len(self._given) else 0


class PriorityChoices(Choices):
    """Probabilistic concurrency testing: random priorities with `depth - 1` random changes.

    Burckhardt et al., "A randomized scheduler with probabilistic guarantees of
    finding bugs" (2010).  `length` estimates the choices of one run.
    """

    def __init__(self, seed: int, depth: int = 3, length: int = 64) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._changes = {self._random.randrange(length): -n for n in range(1, depth)}
        self._priority: dict[int, float] = {}

    def schedule(self, enabled: Sequence[Actor], continues: bool) -> int:
        if len(enabled) == 1:
            return 0
        priority = self._priority
        for actor in enabled:
            if actor.index not in priority:
                priority[actor.index] = self._random.random()
        choice = max(range(len(enabled)), key=lambda at: priority[enabled[at].index])
        change = self._changes.get(len(self.taken))
        if change is not None:
            priority[enabled[choice].index] = change
        self.taken.append(choice)
        return choice

    def pick(self, options: int) -> int:
        return self._random.randrange(options)


def encode(choices: Sequence[int]) -> str:
    """Choices as text: ``position=choice`` for each that is not 0; ``-`` when all are."""
    return ",".join(f"{at}={c}" for at, c in enumerate(choices) if c) or "-"


def decode(text: str) -> list[int]:
    """Inverse of `encode`.  Raises `ValueError` on malformed text."""
    if text == "-":
        return []
    pairs = [part.split("=") for part in text.split(",")]
    if any(len(pair) != 2 or not all(p.isascii() and p.isdigit() for p in pair) for pair in pairs):
        raise ValueError(f"not a list of choices: {text!r}")
    numbers = {int(at): int(choice) for at, choice in pairs}
    if max(numbers) > 1_000_000:
        raise ValueError(f"choice position out of range: {max(numbers)}")
    choices = [0] * (max(numbers) + 1)
    for at, choice in numbers.items():
        choices[at] = choice
    return choices
