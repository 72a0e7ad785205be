"""Experiments on failure: a peer that dies, and operations that are given up."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from commlayer.semantics import PeerLoss
from commlayer_testkit.conformance.probes.experiment import Experiment, Measurement, Pair
from commlayer_testkit.conformance.probes.rank import Concluded, ProbeRank
from commlayer_testkit.conformance.ranks.stopping import stopped

_LARGE = 64 << 20
_SOON = 3.0  # seconds; a loss that is told at all was told within one


def _lose_peer(here: ProbeRank, variant: str) -> tuple[int, Any]:
    """Stop rank 1 for good and post an operation with it; its process and the work, for rank 0.

    `variant`: a receive that nobody serves, a send that nobody receives, or a
    transfer under way, which cannot end because the peer is stopped in it.
    """
    if here.rank == 1:
        if variant == "mid-transfer":
            here.keep(here.link.irecv(here.blank(_LARGE)))
        here.tell("peer", here.pid)
        os.kill(here.pid, signal.SIGSTOP)
        raise Concluded
    peer = int(here.hear("peer"))
    here.until(lambda: stopped(peer), 10 * here.patience)
    if variant == "receive":
        work = here.link.irecv(here.blank(64))
    else:
        work = here.link.isend(here.pattern(64 if variant == "send" else _LARGE, 1))
    return peer, work


def _play_peer_loss(here: ProbeRank, variant: str) -> None:
    peer, work = _lose_peer(here, variant)
    attempt = here.begin_wait(work)
    attempt.join(0.3)
    here.note("before", str(attempt) if attempt.ended else "pending")
    os.kill(peer, signal.SIGKILL)
    limit = max(_SOON, 3 * here.patience)
    attempt.join(limit)
    if not attempt.ended:
        attempt.seconds = limit
    here.note("wait", {"raised": bool(attempt.error), "said": str(attempt)})
    after = here.attempt(lambda: here.link.isend(here.pattern(8, 2)))
    if after.ok:
        after = here.settle(after.value, limit)
    here.note("next", {"raised": bool(after.error), "said": str(after)})


def _judge_peer_loss(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    values, evidence = [], []
    for variant, ranks in outcomes.items():
        ranks[0]["before"]
        hung = {"raised": False, "said": "never returned"}
        wait, following = ranks[0].get("wait", hung), ranks[0].get("next", hung)
        text = f"{variant}: the wait {wait['said']}"
        if wait["raised"]:
            values.append(PeerLoss.RAISES)
        else:
            told = following["raised"]
            values.append(PeerLoss.NEXT_POST_ONLY if told else PeerLoss.SILENT)
            text += f"; the next send {following['said']}"
        evidence.append(text)
    value = min(values, key=list(PeerLoss).index)
    return {"peer_loss": Measurement(value, tuple(evidence), len(values))}


def _play_errors_polled(here: ProbeRank, variant: str) -> None:
    peer, work = _lose_peer(here, variant)
    os.kill(peer, signal.SIGKILL)
    polled = here.attempt(
        here.until, lambda: here.link.poll(work), _SOON, seconds=_SOON + here.patience
    )
    here.note("poll", {"raised": bool(polled.error), "said": str(polled), "yes": polled.value})


def _judge_errors_polled(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    polls = {variant: ranks[0]["poll"] for variant, ranks in outcomes.items()}
    evidence = tuple(
        f"{variant}, peer killed: polling "
        + (poll["said"] if poll["raised"] else "said yes" if poll["yes"] else "said no")
        for variant, poll in polls.items()
    )
    value = all(poll["raised"] for poll in polls.values())
    return {"errors_polled": Measurement(value, evidence, len(polls))}


EXPERIMENTS = (
    Experiment(
        ("peer_loss",), _play_peer_loss, _judge_peer_loss, ("receive", "send", "mid-transfer")
    ),
    Experiment(
        ("errors_polled",), _play_errors_polled, _judge_errors_polled, ("receive", "mid-transfer")
    ),
)
