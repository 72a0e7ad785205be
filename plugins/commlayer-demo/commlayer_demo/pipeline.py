"""One rank's run: its stages for every step of every micro-batch, and the sampled tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from commlayer.handle import AllOf, Handle
from commlayer.pipeline.loop import Activation, Channels, StageLoop
from commlayer.pipeline.topology import Topology
from commlayer_demo.model import KVCache, Span, Stage
from commlayer_demo.schedule import MicroBatch, Scheduler, Step


class Link(Channels, Protocol):
    """What a rank needs of a `commlayer.Communicator`."""

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Any: ...


@dataclass(frozen=True)
class RunStats:
    """What one run of all requests took on one rank.  Seconds and tokens.

    `busy` is the time spent computing, `cpu` the processor time of that.
    """

    seconds: float
    busy: float
    cpu: float
    tokens: int
    steps: int
    broadcasts: int


@dataclass
class _Turn:
    """A micro-batch on this rank, its step under way, and the tokens which that gave."""

    batch: MicroBatch
    step: Step | None = None
    tokens: Tensor | None = None
    arriving: Handle | None = None

    @property
    def tokens_known(self) -> bool:
        return self.arriving is None or self.arriving.is_completed()


class Pipeline:
    """Runs this rank's stages, in the order of `topology`, for every step that is planned.

    Overlapped, a micro-batch's next step begins as soon as the tokens of its last
    one are known, while others are under way, and a rank waits only when it has
    nothing to compute.  Blocking, a rank finishes its part of one step, its send
    and its broadcast included, before it begins the next.  Both compute the same.
    `on_step` is told after each step how many tokens there are so far.
    """

    def __init__(
        self,
        comm: Link,
        topology: Topology,
        stages: Sequence[Stage],
        scheduler: Scheduler,
        *,
        blocking: bool = False,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._comm = comm
        self._topology = topology
        self._stages = stages
        self._scheduler = scheduler
        self._blocking = blocking
        self._on_step = on_step
        self._loop: StageLoop[_Turn] = StageLoop(comm, topology, self._compute)
        self._caches: dict[int, list[KVCache]] = {}
        self._busy = 0.0
        self._cpu = 0.0
        self._tokens = 0
        self._steps = 0
        self._broadcasts = 0

    def run(self) -> RunStats:
        """Run until every request has ended."""
        start = time.perf_counter()
        with torch.inference_mode():
            due = deque(_Turn(batch) for batch in self._scheduler.batches)
            while due or self._loop.pending:
                while due and self._may_begin(due[0]):
                    self._begin(due.popleft())
                if self._blocking:
                    self._loop.park()
                elif self._loop.pending:
                    self._loop.step()
                while self._loop.finished:
                    ended = self._loop.finished.popleft()
                    self._end(ended.batch, ended.result)
                    due.append(ended.batch)
        return RunStats(
            seconds=time.perf_counter() - start,
            busy=self._busy,
            cpu=self._cpu,
            tokens=self._tokens,
            steps=self._steps,
            broadcasts=self._broadcasts,
        )

    def _may_begin(self, turn: _Turn) -> bool:
        return not self._loop.pending or (not self._blocking and turn.tokens_known)

    def _begin(self, turn: _Turn) -> None:
        """Take in the tokens of the last step and submit the next, if there is one."""
        if turn.tokens is not None:
            assert turn.step is not None
            if turn.arriving is not None:
                turn.arriving.wait()
            self._advance(turn.step, turn.tokens.tolist())
            turn.tokens = turn.arriving = None
        turn.step = self._scheduler.plan(turn.batch)
        if turn.step is not None:
            self._loop.submit(turn)

    def _advance(self, step: Step, tokens: Sequence[int]) -> None:
        for ended in self._scheduler.advance(step, tokens):
            del self._caches[ended]
        self._tokens += len(tokens)

    def _compute(self, turn: _Turn, v: int, activation: Activation | None) -> Any:
        """Virtual stage `v`: an activation, or the sampled tokens if it is the last."""
        assert turn.step is not None
        step, stage = turn.step, self._stages[v]
        with self._working():
            hidden = _embed(stage, step) if activation is None else activation["hidden"]
            hidden = stage.forward(hidden, self._spans(step, v))
            if not self._topology.last(self._comm.rank, v):
                return {"hidden": hidden}
            return stage.logits(hidden[step.sampling_rows]).argmax(-1) if step.sampling else None

    def _end(self, turn: _Turn, sampled: Tensor | None) -> None:
        """Share the tokens of the turn's step; `sampled` on the rank that samples."""
        assert turn.step is not None
        self._steps += 1
        if turn.step.sampling:
            if sampled is None:
                turn.tokens = torch.empty(len(turn.step.sampling), dtype=torch.int64)
            else:
                turn.tokens = sampled
            shared = self._comm.broadcast(turn.tokens, self._topology.sampling_rank, async_op=True)
            self._broadcasts += 1
            if self._blocking:
                shared.wait()
            elif sampled is None:
                turn.arriving = shared
        self._on_step(self._tokens)

    def _spans(self, step: Step, v: int) -> list[Span]:
        spans = []
        for segment in step.segments:
            caches = self._caches.get(segment.request)
            if caches is None:
                capacity = self._scheduler.capacity(segment.request)
                caches = [stage.new_cache(capacity) for stage in self._stages]
                self._caches[segment.request] = caches
            spans.append(Span(caches[v], segment.start, len(segment.tokens)))
        return spans

    @contextmanager
    def _working(self) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.thread_time()
        yield
        self._busy += time.perf_counter() - start
        self._cpu += time.thread_time() - cpu_start


def _embed(stage: Stage, step: Step) -> Tensor:
    return stage.embed(torch.tensor([t for segment in step.segments for t in segment.tokens]))


class Alone:
    """The link of a single process that holds the whole model."""

    rank = 0
    world_size = 1

    def channel(self, name: str) -> Alone:
        return self

    def isend_tensor_dict(self, tensor_dict: Mapping[str, Any], dst: int) -> Handle:
        raise NotImplementedError("a single process has nobody to send to")

    def irecv_tensor_dict(self, src: int) -> Handle:
        raise NotImplementedError("a single process has nobody to receive from")

    def broadcast(self, tensor: Tensor, src: int, async_op: bool) -> Handle:
        return AllOf((), time.monotonic)
