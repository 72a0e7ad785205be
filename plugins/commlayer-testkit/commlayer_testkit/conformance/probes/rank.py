"""What an experiment works with inside a rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from commlayer_testkit.conformance.probes.link import Link

_PERIOD = 251  # a prime below 256, so that shifted patterns differ in every byte


@dataclass
class Attempt:
    """A call that may never return: whether it has, with what, and after how many seconds."""

    ended: bool = False
    error: str = ""
    value: Any = None
    seconds: float = 0.0
    join: Callable[[float], None] = field(default=lambda seconds: None, repr=False)
    """Give the call up to so many seconds more."""

    @property
    def ok(self) -> bool:
        return self.ended and not self.error

    def __str__(self) -> str:
        if not self.ended:
            return f"still blocked after {self.seconds:.1f} s"
        if self.error:
            return f"raised after {self.seconds:.2f} s ({self.error})"
        return f"returned after {self.seconds * 1e3:.1f} ms"


class Concluded(Exception):
    """The experiment is over on both ranks, wherever the other one is."""


class ProbeRank:
    """Rank 0 or 1 of an experiment.

    `patience` is how many seconds nothing must happen before an experiment says
    that it does not happen.  Facts about calls that may block are gathered by
    `attempt`; whatever is noted outlives the process.  `meet`, `tell` and `hear`
    use a store, never the transport under test.
    """

    def __init__(
        self,
        rank: int,
        link: Link,
        store: Any,
        say: Callable[[tuple[str, Any]], None],
        patience: float,
        *,
        one_thread_only: bool,
    ) -> None:
        self.rank = rank
        self.link = link
        self.patience = patience
        self._store = store
        self._say = say
        self._inline = one_thread_only
        self._kept: list[Any] = []

    def note(self, name: str, value: Any) -> None:
        """Record an observation; it is kept even if this process dies next."""
        self._say((name, value))

    def meet(self, name: str) -> None:
        """Wait until the other rank is at the meeting `name` too."""
        self.tell(f"{name}/{self.rank}")
        self.hear(f"{name}/{1 - self.rank}")

    def tell(self, name: str, value: object = "") -> None:
        """Say something once; `hear` returns it on either rank."""
        self._store.set(name, str(value))

    def hear(self, name: str) -> str:
        """Wait for what `tell` says under `name`."""
        self._store.wait([name], timedelta(seconds=600))
        return bytes(self._store.get(name)).decode()

    def begin(self, call: Callable[..., Any], *arguments: Any) -> Attempt:
        """Make a call on a thread of its own; `Attempt.join` gives it time."""
        attempt = Attempt()
        started = time.monotonic()

        def run() -> None:
            try:
                attempt.value = call(*arguments)
            except Exception as error:
                attempt.error = first_line(error)
            attempt.seconds = time.monotonic() - started
            attempt.ended = True

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        attempt.join = thread.join
        return attempt

    def begin_wait(self, work: Any) -> Attempt:
        """Wait for `work` meanwhile; by polling where only one thread may call."""
        if not self._inline:
            return self.begin(self.link.wait, work)
        attempt = Attempt()
        started = time.monotonic()

        def poll(seconds: float) -> None:
            try:
                attempt.ended = self.until(lambda: self.link.poll(work), seconds)
            except Exception as error:
                attempt.ended, attempt.error = True, first_line(error)
            attempt.seconds = time.monotonic() - started

        attempt.join = poll
        return attempt

    def keep(self, *objects: Any) -> None:
        """Never free `objects`: freeing a native one may block with the interpreter locked."""
        self._kept.extend(objects)

    def attempt(
        self, call: Callable[..., Any], *arguments: Any, seconds: float | None = None
    ) -> Attempt:
        """Make a call and watch it for `seconds` (default: `patience`).

        It is left behind if it has not ended by then, and its attempt is filled in
        when it ends.  On a transport that wants one thread it is made on this one,
        and a call that blocks ends the experiment at its hard limit.
        """
        limit = self.patience if seconds is None else seconds
        if self._inline:
            return self._here(call, *arguments)
        attempt = self.begin(call, *arguments)
        attempt.join(limit)
        if not attempt.ended:
            attempt.seconds = limit
        return attempt

    @staticmethod
    def _here(call: Callable[..., Any], *arguments: Any) -> Attempt:
        started = time.monotonic()
        try:
            value, error = call(*arguments), ""
        except Exception as raised:
            value, error = None, first_line(raised)
        return Attempt(True, error, value, time.monotonic() - started)

    def settle(self, work: Any, seconds: float | None = None) -> Attempt:
        """Wait for a work, its device included."""
        return self.attempt(self._complete, work, seconds=seconds)

    def _complete(self, work: Any) -> None:
        self.link.wait(work)
        if self.link.device != "cpu":
            torch.accelerator.synchronize()

    def completes(self, work: Any, seconds: float | None = None) -> bool:
        """Whether `work` completes within `seconds`; polled where only one thread may call."""
        if self._inline:
            return self.until(lambda: self.link.poll(work), seconds)
        return self.settle(work, seconds).ok

    def until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Whether `condition` comes true within `seconds` (default: `patience`)."""
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        while not condition():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def pattern(self, size: int, seed: int) -> Tensor:
        """`size` bytes that differ in every place from those of another seed below 251."""
        period = torch.arange(_PERIOD, dtype=torch.int32).add(seed).remainder(_PERIOD)
        whole = period.to(torch.uint8).repeat(size // _PERIOD + 1)[:size]
        return whole.contiguous().to(self.link.device)

    def blank(self, size: int) -> Tensor:
        """`size` bytes of a value that no pattern has."""
        return torch.full((size,), 255, dtype=torch.uint8, device=self.link.device)

    def holds(self, tensor: Tensor, seed: int) -> bool:
        """Whether `tensor` is the pattern of `seed`."""
        return torch.equal(tensor, self.pattern(tensor.numel(), seed))

    @property
    def pid(self) -> int:
        return os.getpid()


def first_line(error: BaseException) -> str:
    """Type and first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    text = text.rpartition("] ")[2] or text
    return f"{type(error).__name__}: {text[:100]}"


def in_words(size: int) -> str:
    """A number of bytes, for evidence."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or size % 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"
