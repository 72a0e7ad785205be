"""Which device types' memory the transport carries, of those that are here."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Pair,
    unmeasured,
)
from commlayer_testkit.conformance.probes.facts import P2P
from commlayer_testkit.conformance.probes.rank import ProbeRank


def _play(here: ProbeRank, variant: str) -> None:
    device = variant
    if variant == "accelerator":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or not torch.accelerator.is_available():
            return
        device = accelerator.type
    content = here.pattern(64, 1).to(device)
    buffer = content if here.rank == 0 else torch.zeros_like(content)
    post = here.link.isend if here.rank == 0 else here.link.irecv
    here.note("device", device)
    attempt = here.attempt(lambda: here.link.wait(post(buffer)), seconds=5 * here.patience)
    here.note("said", str(attempt))
    here.note("intact", attempt.ok and torch.equal(buffer, content))


def _judge(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    receivers = [ranks[1] for ranks in outcomes.values() if ranks[1].get("device")]
    carried = tuple(outcome["device"] for outcome in receivers if outcome.get("intact"))
    evidence = tuple(
        f"64 B in {outcome['device']} memory: "
        + ("intact" if outcome.get("intact") else outcome.get("said", outcome.ending))
        for outcome in receivers
    )
    if not receivers:
        return {"devices": unmeasured("no device could be tried")}
    return {"devices": Measurement(carried, evidence, len(receivers))}


EXPERIMENTS = (
    Experiment(
        ("devices",),
        _play,
        _judge,
        ("cpu", "accelerator"),
        kinds=(P2P,),
        whole_transport=("devices",),
    ),
)
