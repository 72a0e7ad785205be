"""Start the rank processes, watch them, and compare with a single process."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

import torch
from commlayer_testkit.ports import free_port

from commlayer.errors import CommError, ErrorKind
from commlayer.pipeline.topology import LinearTopology
from commlayer_demo.pipeline import Alone, Pipeline, RunStats
from commlayer_demo.weights import Progress, load_stages
from commlayer_demo.worker import Doing, Failed, Job, Message, Report, main

STALL_SECONDS = 120.0
"""A run in which no rank says anything for so long is ended."""


def run_stages(job: Job, progress: Progress) -> list[Report]:
    """Run `job` on one process a rank and return what each reported, by rank.

    No process outlives the call.
    Raises `CommError` when a rank fails, dies or falls silent.
    """
    size = job.topology.ranks
    progress(f"Starting {size} processes", 0, 0)
    context = multiprocessing.get_context("spawn")
    port = free_port()
    ranks: dict[Connection, int] = {}
    processes: list[SpawnProcess] = []
    try:
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=main, args=(rank, job, port, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ranks[here] = rank
        reports = _collect(ranks, progress)
        for process in processes:
            process.join(job.config.close_timeout)
        return [reports[rank] for rank in range(size)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(ranks: dict[Connection, int], progress: Progress) -> dict[int, Report]:
    reports: dict[int, Report] = {}
    while len(reports) < len(ranks):
        pending = [connection for connection, rank in ranks.items() if rank not in reports]
        ready = wait(pending, STALL_SECONDS)
        if not ready:
            silent = ", ".join(str(ranks[connection]) for connection in pending)
            raise _failure(f"ranks {silent} said nothing for {STALL_SECONDS:.0f} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                message: Message = connection.recv()
            except EOFError:
                raise _failure(f"the process of rank {rank} died") from None
            if isinstance(message, Failed):
                raise _failure(f"rank {rank} failed: {message.message}")
            if isinstance(message, Report):
                reports[rank] = message
            if isinstance(message, Doing):
                progress(message.phase, message.done, message.total)
    return reports


def _failure(cause: str) -> CommError:
    return CommError(ErrorKind.PEER_LOST, "demo", cause, "All ranks were ended")


def run_alone(job: Job, progress: Progress) -> tuple[list[list[int]], RunStats]:
    """The same requests, in the same batches, with the whole model in this process.

    One thread computes, as in a stage: sums are then taken in the same order.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        stages = load_stages(job.source, [range(job.source.config.layers)])
        scheduler = job.scheduler()
        budget = job.token_budget

        def tell(count: int) -> None:
            progress("Checking with a single process", count, budget)

        tell(0)
        stats = Pipeline(Alone(), LinearTopology(1), stages, scheduler, on_step=tell).run()
        return scheduler.generated(), stats
    finally:
        torch.set_num_threads(threads)
