"""``commlayer sim check``: can these ranks deadlock?  Added to its group by `sim`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from commlayer_tools.output import JSON, print_json

from commlayer_testkit.commands.topology import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from commlayer.pipeline.topology import Topology
    from commlayer.semantics import Semantics
    from commlayer_testkit.schedule.check import Facts, Schedule, Verdict


class Headers(str, Enum):
    """How activations are announced."""

    NONE = "none"
    POSTED = "posted"
    BLOCKING = "blocking"


def check(
    file: Path | None = typer.Argument(
        None, help="Schedules in TOML or JSON; without, those of a pipeline."
    ),
    topology: Shape = typer.Option(Shape.FOLDED, help="Topology of the pipeline."),
    ranks: int = typer.Option(2, min=1, help="Ranks of the pipeline."),
    stages: int = typer.Option(2, min=1, help="Virtual stages a rank of the folded topology."),
    batches: int = typer.Option(2, min=1, help="Batches in flight."),
    one_channel: bool = typer.Option(False, "--one-channel", help="Send all on one channel."),
    headers: Headers = typer.Option(
        Headers.NONE, help="Headers before activations, over gloo, as engines send them."
    ),
    transport: str = typer.Option(
        "hccl", help="What carries activations: a simulator profile or an installed backend."
    ),
    json: bool = JSON,
) -> None:
    """Say without running whether ranks can deadlock, and how not to.

    Exit code 0 if they cannot, 1 if they can.
    """
    from commlayer_testkit.schedule.check import check as check_schedules
    from commlayer_testkit.schedule.files import read_schedules
    from commlayer_testkit.schedule.repair import propose

    schedules: Sequence[Schedule]
    if file is not None:
        schedules, facts = read_schedules(file, _named)
    else:
        schedules, facts = _pipeline(
            topology.of(ranks, stages), batches, one_channel, headers, transport
        )
    try:
        verdict = check_schedules(schedules, facts)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    proposals = propose(schedules, facts)
    if json:
        print_json(
            {
                **_plain(verdict),
                "proposals": [{"cure": p.cure.value, "steps": p.steps} for p in proposals],
            }
        )
    else:
        typer.echo(str(verdict))
        for proposal in proposals:
            typer.echo(f"passes with {proposal}")
    raise typer.Exit(0 if verdict.ok else 1)


def _named(name: str) -> Semantics:
    from commlayer.registry import default_registry
    from commlayer_testkit.sim.profiles import PROFILES

    if name in PROFILES:
        return PROFILES[name].semantics
    return default_registry().load(name).backend.semantics


def _pipeline(
    topology: Topology, batches: int, one_channel: bool, headers: Headers, transport: str
) -> tuple[Sequence[Schedule], Facts]:
    from commlayer_testkit.schedule.plans import pipeline_schedules

    schedules = pipeline_schedules(
        topology,
        batches,
        one_channel=one_channel,
        blocking_headers=None if headers is Headers.NONE else headers is Headers.BLOCKING,
    )
    facts = dict.fromkeys(topology.channels, _named(transport))
    return schedules, {**facts, "headers": _named("gloo")}


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "ok": verdict.ok,
        "cycle": [
            {
                "rank": need.place.rank,
                "index": need.place.index,
                "action": need.place.action,
                "why": need.why,
            }
            for need in verdict.cycle
        ],
        "unmatched": [
            {"rank": place.rank, "index": place.index, "action": place.action}
            for place in verdict.unmatched
        ],
    }
