"""Which requests are computed when: the same on every rank, from tokens alone.

Requests share a micro-batch, several micro-batches are in flight, and the next
waiting request takes the place of one that ended.  A prompt is computed in
chunks; the step that computes its last token samples the first new one.  All
decisions depend on the prompts and on sampled tokens, so ranks that see the same
tokens plan the same steps without asking each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """How requests are batched.  Tokens and requests; all at least 1."""

    max_tokens: int
    micro_batch: int
    in_flight: int
    prefill_chunk: int


@dataclass(frozen=True)
class Segment:
    """Tokens of one request that a step computes, from position `start` on."""

    request: int
    start: int
    tokens: tuple[int, ...]
    samples: bool


@dataclass(frozen=True)
class Step:
    """One pass of a micro-batch through the stages."""

    segments: tuple[Segment, ...]

    @property
    def sampling(self) -> list[int]:
        """The requests that get a token from this step; empty in the midst of prompts."""
        return [segment.request for segment in self.segments if segment.samples]

    @property
    def sampling_rows(self) -> list[int]:
        """The rows, one a token of the step, from which those tokens are predicted."""
        rows, end = [], 0
        for segment in self.segments:
            end += len(segment.tokens)
            if segment.samples:
                rows.append(end - 1)
        return rows


@dataclass
class _Request:
    tokens: list[int]
    prompt_length: int
    computed: int = 0
    done: bool = False


@dataclass
class MicroBatch:
    """The requests that now travel together."""

    requests: list[int] = field(default_factory=list)


class Scheduler:
    """Plans the steps of all requests.

    `plan` a micro-batch's next step, give the tokens it sampled to `advance`
    before that micro-batch is planned again, and plan the `batches` in turn, in
    the same order on every rank.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], limits: Limits, stop_tokens: Sequence[int]
    ) -> None:
        if any(not prompt for prompt in prompts):
            raise ValueError("a prompt needs at least one token")
        self._limits = limits
        self._stop_tokens = frozenset(stop_tokens)
        self._requests = [_Request(list(prompt), len(prompt)) for prompt in prompts]
        self._waiting = deque(range(len(prompts)))
        needed = -(-len(prompts) // limits.micro_batch)
        self.batches = [MicroBatch() for _ in range(min(limits.in_flight, needed))]

    def capacity(self, request: int) -> int:
        """The most tokens of this request that are ever computed."""
        return self._requests[request].prompt_length + self._limits.max_tokens

    def plan(self, batch: MicroBatch) -> Step | None:
        """The next step of `batch`, or None when it has nothing left to do."""
        batch.requests = [i for i in batch.requests if not self._requests[i].done]
        while self._waiting and len(batch.requests) < self._limits.micro_batch:
            batch.requests.append(self._waiting.popleft())
        if not batch.requests:
            return None
        return Step(tuple(self._segment(index) for index in batch.requests))

    def _segment(self, index: int) -> Segment:
        request = self._requests[index]
        start = request.computed
        request.computed = min(len(request.tokens), start + self._limits.prefill_chunk)
        return Segment(
            request=index,
            start=start,
            tokens=tuple(request.tokens[start : request.computed]),
            samples=request.computed == len(request.tokens),
        )

    def advance(self, step: Step, tokens: Sequence[int]) -> list[int]:
        """Append one token to each sampling request; return the requests that this ends."""
        ended = []
        for index, token in zip(step.sampling, tokens, strict=True):
            request = self._requests[index]
            request.tokens.append(token)
            generated = len(request.tokens) - request.prompt_length
            if token in self._stop_tokens or generated == self._limits.max_tokens:
                request.done = True
                ended.append(index)
        return ended

    def generated(self) -> list[list[int]]:
        """The new tokens of every request so far, a closing stop token included."""
        return [request.tokens[request.prompt_length :] for request in self._requests]
