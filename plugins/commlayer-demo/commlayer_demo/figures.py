"""What a run of the demo amounts to, in numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from commlayer_demo.pipeline import RunStats
from commlayer_demo.worker import Job, Report


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Mode:
    """One way to run, in all rounds.

    For each rank, `idle_share` is time not spent computing over time in all, and
    `core_share` processor time over time of computing: well under 1 when other
    programs took the cores.
    """

    tokens_per_second: Spread
    idle_share: list[Spread]
    core_share: list[Spread]


@dataclass(frozen=True)
class Answer:
    prompt: str
    text: str
    tokens: int


@dataclass(frozen=True)
class Figures:
    """All that the demo prints.

    `layers` are start and stop by stage, `ranks` the stages by rank.  `broadcasts`
    of `steps` shared tokens, the others sampled none.  Peaks are by rank.
    `overlapped`, `blocking` and `ratio` need at least one round.
    """

    model: str
    backend: str
    layers: list[tuple[int, int]]
    ranks: list[list[int]]
    micro_batch: int
    in_flight: int
    rounds: int
    answers: list[Answer]
    tokens: int
    steps: int
    broadcasts: int
    tokens_identical: bool
    overlapped: Mode | None
    blocking: Mode | None
    ratio: Spread | None
    single_process_tokens_per_second: float
    peak_sends_in_flight: list[int]
    peak_bytes_in_flight: list[int]


def summarize(
    model: str,
    job: Job,
    prompts: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    reports: Sequence[Report],
    alone: tuple[list[list[int]], RunStats],
) -> Figures:
    """Put together what the ranks and the single process reported."""
    topology = job.topology
    generated = reports[-1].tokens
    expected, alone_stats = alone
    measured = job.rounds > 0
    overlapped = _by_round([report.overlapped for report in reports])
    blocking = _by_round([report.blocking for report in reports])
    return Figures(
        model=model,
        backend=job.config.backend,
        layers=sorted(
            (part.start, part.stop) for rank in range(topology.ranks) for part in job.layers(rank)
        ),
        ranks=[
            [topology.chunk(v, rank) for v in range(topology.virtual_stages)]
            for rank in range(topology.ranks)
        ],
        micro_batch=job.limits.micro_batch,
        in_flight=job.limits.in_flight,
        rounds=job.rounds,
        answers=[
            Answer(prompt, decode(tokens), len(tokens))
            for prompt, tokens in zip(prompts, generated, strict=True)
        ],
        tokens=sum(map(len, generated)),
        steps=reports[-1].first.steps,
        broadcasts=reports[-1].first.broadcasts,
        tokens_identical=all(report.tokens == expected for report in reports),
        overlapped=_mode(overlapped) if measured else None,
        blocking=_mode(blocking) if measured else None,
        ratio=Spread.of([_rate(o) / _rate(b) for o, b in zip(overlapped, blocking, strict=True)])
        if measured
        else None,
        single_process_tokens_per_second=alone_stats.tokens / alone_stats.seconds,
        peak_sends_in_flight=[report.peak_sends for report in reports],
        peak_bytes_in_flight=[report.peak_bytes for report in reports],
    )


def _by_round(by_rank: Sequence[Sequence[RunStats]]) -> list[list[RunStats]]:
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]


def _rate(ranks: Sequence[RunStats]) -> float:
    return ranks[-1].tokens / max(stats.seconds for stats in ranks)


def _mode(rounds: Sequence[Sequence[RunStats]]) -> Mode:
    by_rank = list(zip(*rounds, strict=True))
    return Mode(
        tokens_per_second=Spread.of([_rate(ranks) for ranks in rounds]),
        idle_share=[Spread.of([1 - run.busy / run.seconds for run in runs]) for runs in by_rank],
        core_share=[Spread.of([run.cpu / run.busy for run in runs]) for runs in by_rank],
    )
