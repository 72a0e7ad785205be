"""What each rank process does: connect, load its layers, run, report to its parent."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from commlayer_testkit.ports import LOOPBACK
from msgspec.structs import replace

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.pipeline.topology import Topology
from commlayer_demo.model import split_layers
from commlayer_demo.pipeline import Pipeline, RunStats
from commlayer_demo.schedule import Limits, Scheduler
from commlayer_demo.weights import Source, load_stages

if TYPE_CHECKING:
    from commlayer.communicator import Communicator


Tokens = list[list[int]]
"""The tokens generated for each request."""


@dataclass(frozen=True)
class Job:
    """The work of all ranks.  `rounds` counts measured pairs of runs after a first run."""

    source: Source
    prompts: tuple[tuple[int, ...], ...]
    limits: Limits
    topology: Topology
    rounds: int
    config: CommConfig

    def check(self) -> None:
        """Raise `CommError` (CONFIG) for what the model cannot do."""
        model = self.source.config
        longest = max(map(len, self.prompts)) + self.limits.max_tokens
        cause = cure = ""
        if self.topology.chunks > model.layers:
            cause = f"{model.layers} layers cannot be split over {self.topology.chunks} stages"
            cure = f"Use --stages {model.layers // self.topology.virtual_stages} or fewer"
        elif longest > model.context:
            cause = f"the longest prompt and its answer are {longest} tokens, the model reads "
            cause += f"{model.context}"
            cure = "Shorten the prompt or lower --max-tokens"
        if cause:
            raise CommError(ErrorKind.CONFIG, "demo", cause, cure)

    def layers(self, rank: int) -> list[range]:
        """The layers that `rank` holds, by virtual stage."""
        chunks = split_layers(self.source.config, self.topology.chunks)
        stages = range(self.topology.virtual_stages)
        return [chunks[self.topology.chunk(v, rank)] for v in stages]

    @property
    def connection(self) -> CommConfig:
        """`config` with the channels of the topology, of which only the first is bounded."""
        _, *folds = self.topology.channels
        return replace(
            self.config.with_channels(self.topology.channels),
            unbounded_channels=_union(self.config.unbounded_channels, folds),
        )

    @property
    def token_budget(self) -> int:
        """The most tokens that are generated."""
        return len(self.prompts) * self.limits.max_tokens

    def scheduler(self) -> Scheduler:
        return Scheduler(self.prompts, self.limits, self.source.config.stop_tokens)


def _union(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*first, *second)))


@dataclass(frozen=True)
class Doing:
    """How far the ranks are.  `total` is an upper limit, 0 when unknown."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Report:
    """What a rank has to say at the end.

    `tokens`, `first` and the peaks are those of the first run, which is not timed
    against another; the lists have one entry a round.
    """

    tokens: Tokens
    first: RunStats
    overlapped: list[RunStats]
    blocking: list[RunStats]
    peak_bytes: int
    peak_sends: int


@dataclass(frozen=True)
class Failed:
    """A rank gives up."""

    message: str


Message = Doing | Report | Failed


def main(rank: int, job: Job, port: int, parent: Connection) -> None:
    """Entry point of a rank process.  Ends with the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.topology.ranks),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        parent.send(_run(rank, job, parent))
    except Exception as error:
        detail = "" if isinstance(error, RuntimeError) else traceback.format_exc()
        parent.send(Failed(f"{error}\n{detail}".strip()))


def _end_with_parent() -> None:
    process = parent_process()
    assert process is not None
    process.join()
    os._exit(1)


def _run(rank: int, job: Job, parent: Connection) -> Report:
    import commlayer

    stages = load_stages(job.source, job.layers(rank))
    samples = rank == job.topology.sampling_rank
    with commlayer.connect(job.connection) as comm:

        def run(phase: str, start: int, total: int, blocking: bool) -> tuple[Tokens, RunStats]:
            def tell(count: int) -> None:
                if samples:
                    parent.send(Doing(phase, start + count, total))

            scheduler = job.scheduler()
            _meet(comm)
            pipeline = Pipeline(
                comm, job.topology, stages, scheduler, blocking=blocking, on_step=tell
            )
            stats = pipeline.run()
            return scheduler.generated(), stats

        tokens, first = run("Generating tokens", 0, job.token_budget, blocking=False)
        peak = comm.ledger.snapshot()
        measured: dict[bool, list[RunStats]] = {False: [], True: []}
        total = 2 * job.rounds * first.tokens
        for index in range(2 * job.rounds):
            blocking = index % 4 in (1, 2)
            again, stats = run("Measuring", index * first.tokens, total, blocking)
            if again != tokens:
                raise RuntimeError("two runs of the same requests gave different tokens")
            measured[blocking].append(stats)
    return Report(tokens, first, measured[False], measured[True], peak.peak_bytes, peak.peak_sends)


def _meet(comm: Communicator) -> None:
    """Return once every rank has called it."""
    for src in range(comm.world_size):
        comm.broadcast(torch.zeros(1), src)
