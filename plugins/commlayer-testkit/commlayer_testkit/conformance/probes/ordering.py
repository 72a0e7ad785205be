"""Experiments on order: what overtakes what, how much may be in flight, and from which threads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from commlayer.semantics import Order, Threads
from commlayer_testkit.conformance.probes.experiment import Experiment, Measurement, Missing, Pair
from commlayer_testkit.conformance.probes.facts import COLLECTIVE, P2P
from commlayer_testkit.conformance.probes.rank import ProbeRank

_FLOOD = 1000
_ROUNDS, _PER_ROUND, _ROUND_BYTES = 20, 50, 4096
_THREAD_MESSAGES = 300


def _numbered(number: int, size: int = 8) -> torch.Tensor:
    return torch.full((size // 8,), number, dtype=torch.int64).view(torch.uint8)


def _number(tensor: torch.Tensor) -> int:
    values = tensor.cpu().view(torch.int64)
    return int(values[0]) if bool((values == values[0]).all()) else -1


def _play_order(here: ProbeRank, variant: str) -> None:
    {"flood": _flood, "tags": _tags, "streams": _streams}[variant](here)


def _flood(here: ProbeRank) -> None:
    """Many sends at once, to receives posted later and to receives posted before."""
    link, device = here.link, here.link.device
    long = 10 * here.patience
    works = []
    if here.rank == 0:
        for number in range(_FLOOD):
            attempt = here.attempt(link.isend, _numbered(number).to(device))
            if not attempt.ok:
                here.note("refused", f"post {number + 1} {attempt}")
                break
            works.append(attempt.value)
        here.note("posted", len(works))
        here.tell("posted", len(works))
        for work in works:
            here.settle(work, long)
    else:
        got = []
        for _ in range(int(here.hear("posted"))):
            into = here.blank(8)
            if not here.settle(link.irecv(into), long).ok:
                break
            got.append(_number(into))
        here.note("got", len(got))
        here.note("overtaken", sum(number != place for place, number in enumerate(got)))
    here.meet("flooded")
    overtaken = 0
    for turn in range(_ROUNDS):
        buffers = [
            _numbered(turn * _PER_ROUND + place, _ROUND_BYTES).to(device)
            if here.rank == 0
            else here.blank(_ROUND_BYTES)
            for place in range(_PER_ROUND)
        ]
        if here.rank == 0:
            here.hear(f"receiving {turn}")
            works = [link.isend(buffer) for buffer in buffers]
        else:
            works = [link.irecv(buffer) for buffer in buffers]
            here.tell(f"receiving {turn}")
        for work in works:
            here.settle(work, long)
        if here.rank == 1:
            first = turn * _PER_ROUND
            overtaken += sum(_number(b) != first + place for place, b in enumerate(buffers))
    here.note("overtaken in rounds", overtaken)


def _tags(here: ProbeRank) -> None:
    """Receive the second of two tags while the first is not asked for, and the other way round."""
    link = here.link
    if here.rank == 0:
        works = [link.isend(here.pattern(64, tag), tag) for tag in (1, 2)]
        here.meet("tags")
        for work in works:
            here.settle(work, 3 * here.patience)
        here.meet("unused")
        here.settle(link.isend(here.pattern(64, 3), 3))
    else:
        here.meet("tags")
        second, first = here.blank(64), here.blank(64)
        attempt = here.settle(link.irecv(second, 2))
        here.note("second", str(attempt))
        here.note("second intact", attempt.ok and here.holds(second, 2))
        attempt = here.settle(link.irecv(first, 1))
        here.note("first intact", attempt.ok and here.holds(first, 1))
        here.meet("unused")
        never, third = here.blank(64), here.blank(64)
        idle = link.irecv(never, 9)
        attempt = here.settle(link.irecv(third, 3))
        here.note("third intact", attempt.ok and here.holds(third, 3))
        del idle


def _streams(here: ProbeRank) -> None:
    """A send behind a receive that is not served: does it get through?"""
    link = here.link
    if here.rank == 0:
        late = link.irecv(here.blank(64))
        sent = link.isend(here.pattern(64, 1))
        here.hear("looked")
        here.settle(sent)
        here.settle(late)
    else:
        attempt = here.settle(link.irecv(here.blank(64)))
        here.note("overtook", attempt.ok)
        here.note("said", str(attempt))
        here.tell("looked")
        here.settle(link.isend(here.pattern(64, 2)))


def _judge_flood(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender, receiver = outcomes["flood"]
    posted, got = sender["posted"], receiver["got"]
    overtaken = receiver["overtaken"] + receiver["overtaken in rounds"]
    total = posted + _ROUNDS * _PER_ROUND
    evidence = (
        f"{overtaken} of {total} messages arrived out of place "
        f"({posted} sent before any receive, {_ROUNDS} times {_PER_ROUND} after)"
    )
    limit = f"{got} of {posted} sent at once arrived"
    refused = sender.get("refused")
    outstanding = 1 if overtaken else posted if refused or got < posted else 0
    return {
        "order": Measurement(
            Order.UNORDERED if overtaken else Order.IN_ORDER_STREAM, (evidence,), total
        ),
        "max_outstanding_per_pair": Measurement(
            outstanding, (limit, *([refused] if refused else [])), posted
        ),
    }


def _judge_order(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    measured = _judge_flood(outcomes)
    receiver, other = outcomes["tags"][1], outcomes["streams"][1]
    independent = all(receiver.get(f"{nth} intact") for nth in ("first", "second", "third"))
    order = measured["order"]
    overtook = other.get("overtook", False)
    evidence = (
        *order.evidence,
        f"a send behind a receive that is not served: {other.get('said', 'never arrived')}",
    )
    ignored = receiver.get("second") is not None and not independent
    value = order.value
    if value is Order.IN_ORDER_STREAM and overtook and (independent or ignored):
        value = Order.PER_TAG
    tags = [
        f"receive of tag 2 before tag 1: {receiver.get('second', 'never returned')}"
        + (", right bytes" if receiver.get("second intact") else ", wrong bytes")
    ]
    if independent:
        tags.append("a receive on an unused tag is harmless")
    return {
        **measured,
        "order": Measurement(value, evidence, order.repetitions),
        "tags": Measurement(independent, tuple(tags), 2),
    }


# --- threads ------------------------------------------------------------------------------------


def _play_threads(here: ProbeRank, variant: str) -> None:
    """One thread sends and one receives, on both ranks at once."""
    tasks = [here.begin(_send_many, here), here.begin(_receive_many, here)]
    for task in tasks:
        task.join(10 * here.patience)
    for name, task in zip(("send", "receive"), tasks, strict=True):
        here.note(name, [task.ended, task.error])
    here.note("wrong", tasks[1].value)


def _send_many(here: ProbeRank) -> None:
    for number in range(_THREAD_MESSAGES):
        here.link.wait(here.link.isend(_numbered(number).to(here.link.device)))


def _receive_many(here: ProbeRank) -> int:
    wrong = 0
    for number in range(_THREAD_MESSAGES):
        into = here.blank(8)
        here.link.wait(here.link.irecv(into))
        wrong += _number(into) != number
    return wrong


def _judge_threads(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    ranks = outcomes[""]
    if all(outcome.ended == "raised" for outcome in ranks):
        raise Missing(f"rank 0 {ranks[0].ending}")
    failed = [
        f"rank {outcome.rank}: {outcome.ending}, send {outcome.get('send')}, "
        f"receive {outcome.get('receive')}, {outcome.get('wrong')} wrong"
        for outcome in ranks
        if outcome.ended != "returned"
        or outcome["send"] != [True, ""]
        or outcome["receive"] != [True, ""]
        or outcome["wrong"] != 0
    ]
    count = 4 * _THREAD_MESSAGES
    if failed:
        evidence = (*failed, "funneled and serialized cannot be told apart from outside")
        return {"threads": Measurement(Threads.SERIALIZED, evidence, count, proven=False)}
    evidence = (f"no failure in {count} operations from two threads a rank",)
    return {"threads": Measurement(Threads.MULTIPLE, evidence, count, proven=False)}


EXPERIMENTS = (
    Experiment(
        ("order", "max_outstanding_per_pair", "tags"),
        _play_order,
        _judge_order,
        ("flood", "tags", "streams"),
        kinds=(P2P,),
        whole_transport=("tags",),
    ),
    Experiment(
        ("order", "max_outstanding_per_pair"),
        _play_order,
        _judge_flood,
        ("flood",),
        kinds=(COLLECTIVE,),
    ),
    Experiment(
        ("threads",),
        _play_threads,
        _judge_threads,
        kinds=(P2P,),
        whole_transport=("threads",),
    ),
)
