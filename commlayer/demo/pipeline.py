"""One stage's loop: receive, compute, send on, and pass the sampled tokens back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from commlayer.demo.model import KVCache, Span, Stage
from commlayer.demo.schedule import MicroBatch, Scheduler, Step
from commlayer.handle import CompositeHandle, Handle


class Link(Protocol):
    """What a stage needs of a `commlayer.Communicator`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def isend_tensor_dict(self, tensor_dict: dict[str, Tensor], dst: int) -> Handle: ...
    def irecv_tensor_dict(self, src: int) -> Handle: ...
    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any: ...


@dataclass(frozen=True)
class RunStats:
    """What one run of all requests took on one rank.  Seconds and tokens.

    `idle` is the time spent blocked on a receive, a send or a broadcast, `cpu` the
    processor time of all threads.
    """

    seconds: float
    idle: float
    cpu: float
    tokens: int
    steps: int
    broadcasts: int


@dataclass
class _Turn:
    """A micro-batch on this rank, between two of its steps."""

    batch: MicroBatch
    step: Step | None = None
    planned: bool = False
    arriving: Handle | None = None
    tokens: Tensor | None = None
    tokens_arriving: Handle | None = None


class Pipeline:
    """Runs this rank's stage for every step that the scheduler plans.

    Overlapped, a rank sends and forgets, asks for the next activations before it
    computes, and waits for a micro-batch's tokens only when that micro-batch is
    due again.  Blocking, it waits for each send, receive and broadcast where it
    posts it.  Both compute the same.  `on_step` is told after each step how many
    tokens there are so far.
    """

    def __init__(
        self,
        comm: Link,
        stage: Stage,
        scheduler: Scheduler,
        *,
        blocking: bool = False,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._comm = comm
        self._stage = stage
        self._scheduler = scheduler
        self._blocking = blocking
        self._on_step = on_step
        self._first = comm.rank == 0
        self._last = comm.rank == comm.world_size - 1
        self._caches: dict[int, KVCache] = {}
        self._idle = 0.0
        self._tokens = 0
        self._steps = 0
        self._broadcasts = 0

    def run(self) -> RunStats:
        """Run until every request has ended."""
        start, cpu_start = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            turns = deque(_Turn(batch) for batch in self._scheduler.batches)
            while turns:
                turn = turns.popleft()
                self._prepare(turn)
                if turn.step is None:
                    continue
                if turns and not self._blocking and self._tokens_known(turns[0]):
                    self._prepare(turns[0])
                self._compute(turn, turn.step)
                self._on_step(self._tokens)
                turns.append(turn)
        return RunStats(
            seconds=time.perf_counter() - start,
            idle=self._idle,
            cpu=time.process_time() - cpu_start,
            tokens=self._tokens,
            steps=self._steps,
            broadcasts=self._broadcasts,
        )

    def _tokens_known(self, turn: _Turn) -> bool:
        return turn.tokens_arriving is None or turn.tokens_arriving.is_completed()

    def _prepare(self, turn: _Turn) -> None:
        """Take in the tokens of the last step, plan the next and ask for its activations."""
        if turn.planned:
            return
        if turn.tokens is not None:
            assert turn.step is not None
            if turn.tokens_arriving is not None:
                self._wait(turn.tokens_arriving)
            self._advance(turn.step, turn.tokens.tolist())
            turn.tokens = turn.tokens_arriving = None
        turn.step = self._scheduler.plan(turn.batch)
        turn.planned = True
        if turn.step is not None and not self._first:
            turn.arriving = self._comm.irecv_tensor_dict(self._comm.rank - 1)
            if self._blocking:
                self._wait(turn.arriving)

    def _advance(self, step: Step, tokens: Sequence[int]) -> None:
        for ended in self._scheduler.advance(step, tokens):
            del self._caches[ended]
        self._tokens += len(tokens)

    def _compute(self, turn: _Turn, step: Step) -> None:
        hidden = self._stage.forward(self._input(turn, step), self._spans(step))
        turn.planned = False
        self._steps += 1
        if not self._last:
            sent = self._comm.isend_tensor_dict({"hidden": hidden}, self._comm.rank + 1)
            if self._blocking:
                self._wait(sent)
        if step.sampling:
            self._share_tokens(turn, step, hidden)

    def _share_tokens(self, turn: _Turn, step: Step, hidden: Tensor) -> None:
        if self._last:
            turn.tokens = self._stage.logits(hidden[step.sampling_rows]).argmax(-1)
        else:
            turn.tokens = torch.empty(len(step.sampling), dtype=torch.int64)
        shared = self._comm.broadcast(turn.tokens, self._comm.world_size - 1, async_op=True)
        self._broadcasts += 1
        if self._blocking:
            self._wait(shared)
        elif not self._last:
            turn.tokens_arriving = shared

    def _input(self, turn: _Turn, step: Step) -> Tensor:
        if self._first:
            rows = [token for segment in step.segments for token in segment.tokens]
            return self._stage.embed(torch.tensor(rows))
        assert turn.arriving is not None
        self._wait(turn.arriving)
        hidden: Tensor = turn.arriving.result()["hidden"]
        turn.arriving = None
        return hidden

    def _spans(self, step: Step) -> list[Span]:
        spans = []
        for segment in step.segments:
            cache = self._caches.get(segment.request)
            if cache is None:
                cache = self._stage.new_cache(self._scheduler.capacity(segment.request))
                self._caches[segment.request] = cache
            spans.append(Span(cache, segment.start, len(segment.tokens)))
        return spans

    def _wait(self, handle: Handle) -> None:
        start = time.perf_counter()
        handle.wait()
        self._idle += time.perf_counter() - start


class Alone:
    """The link of a single process that holds the whole model."""

    rank = 0
    world_size = 1

    def isend_tensor_dict(self, tensor_dict: dict[str, Tensor], dst: int) -> Handle:
        raise NotImplementedError("a single process has nobody to send to")

    def irecv_tensor_dict(self, src: int) -> Handle:
        raise NotImplementedError("a single process has nobody to receive from")

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Handle:
        return CompositeHandle((), time.monotonic)
