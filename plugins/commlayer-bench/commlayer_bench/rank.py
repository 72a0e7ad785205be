"""One rank of a benchmark: ``python -m commlayer_bench.rank JOB``.

Rank 0 writes its messages on the standard output, one JSON document a line.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from commlayer_testkit.ports import LOOPBACK

from commlayer_bench.contender import Contender, Kind, Unavailable
from commlayer_bench.contenders import CONTENDERS
from commlayer_bench.job import Away, Job, Message, Progress, Rows
from commlayer_bench.records import Absent, Row
from commlayer_bench.workload import Case, Here, Scale, Workload
from commlayer_bench.workloads import WORKLOADS

TORCH_BACKEND = "gloo"
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")

MESSAGES: Mapping[Kind, Any] = {
    "tensor": torch.arange(64, dtype=torch.bfloat16),
    "object": {"step": 7, "tokens": [1, 2, 3]},
    "dict": {"hidden_states": torch.arange(64.0), "residual": torch.arange(8, dtype=torch.int64)},
    "broadcast": torch.arange(8, dtype=torch.int64),
}
"""What each contender delivers once before anything is measured."""

Tell = Callable[[Message], None]


def main(job: Job, rank: int, tell: Tell) -> None:
    """Connect everything, run the workloads, close."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.ranks),
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(job.port),
    )
    dist.init_process_group(TORCH_BACKEND, timeout=timedelta(minutes=10))
    here = Here()
    contenders = list(_connect(job.contenders, tell))
    for contender in contenders if job.ranks > 1 else ():
        check(contender, here)
    for name in job.workloads:
        workload = WORKLOADS[name]
        for case in workload.cases(Scale(job.scale), job.ranks):
            tell(Progress(name, case.label))
            rounds = min(job.rounds, case.most_rounds)
            tell(Rows(_measure(workload, case, contenders, here, rounds)))
    here.meet()
    for contender in contenders:
        contender.close()
    here.meet()
    dist.destroy_process_group()


def check(contender: Contender, here: Here) -> None:
    """Send a message of every kind from rank 0 to rank 1.  Raises if another one arrives."""
    for kind, way in contender.ways.items():
        message = MESSAGES[kind]
        if here.rank == 0:
            finish = way.send(message, 0 if kind == "broadcast" else 1)
            finish()
        elif here.rank == 1 or kind == "broadcast":
            arrived = way.receive(message, 0)()
            torch.testing.assert_close(
                arrived, message, rtol=0, atol=0, msg=f"{contender.name} changes a {kind}"
            )
        here.meet()


def _connect(names: Sequence[str], tell: Tell) -> Iterator[Contender]:
    for name in names:
        try:
            yield CONTENDERS[name](name)
        except Unavailable as error:
            tell(Away(Absent(name, str(error))))


def _measure(
    workload: Workload, case: Case, contenders: Sequence[Contender], here: Here, rounds: int
) -> tuple[Row, ...]:
    """Rounds in which every contender has one turn; who begins changes from round to round."""
    turns = list(workload.turns(case, contenders, here))
    samples: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(-1, rounds):
        first = number % len(turns) if turns else 0
        for name, turn in turns[first:] + turns[:first]:
            here.meet()
            values = turn()
            if number >= 0:  # the first turn is to warm up
                for metric, value in values.items():
                    samples[name, metric].append(value)
    order = list(workload.metrics)
    return tuple(
        Row(
            workload=workload.name,
            case=case.label,
            x=case.x,
            contender=name,
            metric=metric,
            unit=workload.metrics[metric],
            samples=tuple(values),
        )
        for (name, metric), values in sorted(samples.items(), key=lambda it: order.index(it[0][1]))
    )


def _main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    rank = int(next(os.environ[name] for name in RANK_VARIABLES if name in os.environ))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no message

    def tell(message: Message) -> None:
        if rank == 0:
            out.write(msgspec.json.encode(message) + b"\n")

    try:
        main(job, rank, tell)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # at once: other ranks may wait for this one for ever


if __name__ == "__main__":
    _main()
