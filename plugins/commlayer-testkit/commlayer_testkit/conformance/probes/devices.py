"""Which device types' memory the transport carries, of those that are here."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from commlayer_testkit.conformance.probes.bench import Bench
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Pair,
    unmeasured,
)
from commlayer_testkit.conformance.probes.link import P2P


def _play(bench: Bench, variant: str) -> None:
    device = variant
    if variant == "accelerator":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or not torch.accelerator.is_available():
            return
        device = accelerator.type
    content = bench.pattern(64, 1).to(device)
    buffer = content if bench.rank == 0 else torch.zeros_like(content)
    post = bench.link.isend if bench.rank == 0 else bench.link.irecv
    bench.note("device", device)
    attempt = bench.attempt(lambda: bench.link.wait(post(buffer)), seconds=5 * bench.patience)
    bench.note("said", str(attempt))
    bench.note("intact", attempt.ok and torch.equal(buffer, content))


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
