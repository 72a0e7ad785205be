"""The schedules that a pipelined engine calls, to be checked before it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from commlayer.pipeline.topology import Topology
from commlayer_testkit.schedule.check import Action, recv, send, wait, work

Turn = tuple[int, int]
"""A batch and the number of its call on a rank."""


def calls_first(topology: Topology, rank: int, batches: int) -> list[Turn]:
    """All batches' first calls, then all their continuations, and so on."""
    return [(b, call) for call in range(len(topology.calls(rank))) for b in range(batches)]


def pipeline_schedules(
    topology: Topology,
    batches: int,
    *,
    one_channel: bool = False,
    blocking_headers: bool | None = None,
    turns: Callable[[Topology, int, int], Sequence[Turn]] = calls_first,
) -> list[list[Action]]:
    """What every rank calls to take `batches` through all stages.

    `turns` gives a rank's order of calls.  `one_channel` sends everything over
    ``data``.  With `blocking_headers` every activation follows a header on the
    channel ``headers``, whose send the rank waits for or not.
    """
    return [
        [
            action
            for batch, call in turns(topology, rank, batches)
            for v in topology.calls(rank)[call]
            for action in _stage(topology, rank, v, batch, one_channel, blocking_headers)
        ]
        for rank in range(topology.ranks)
    ]


def _stage(
    topology: Topology,
    rank: int,
    v: int,
    batch: int,
    one_channel: bool,
    blocking_headers: bool | None,
) -> list[Action]:
    chunk = topology.chunk(v, rank)
    actions: list[Action] = []
    source, target = topology.receives(rank, v), topology.sends(rank, v)
    if source is not None:
        name = f"receive of chunk {chunk - 1}'s output for batch {batch}"
        channel = "data" if one_channel else source.channel
        if blocking_headers is not None:
            actions.append(
                recv(source.rank, f"header of {name}", channel="headers", tag=v, blocking=True)
            )
        actions += [recv(source.rank, name, channel=channel), wait(name)]
    actions.append(work(f"chunk {chunk} of batch {batch}"))
    if target is not None:
        name = f"send of chunk {chunk}'s output for batch {batch}"
        channel = "data" if one_channel else target.channel
        if blocking_headers is not None:
            tag = topology.place(chunk + 1)[1]
            header = f"header of {name}"
            actions.append(
                send(target.rank, header, channel="headers", tag=tag, blocking=blocking_headers)
            )
        actions.append(send(target.rank, name, channel=channel))
    return actions
