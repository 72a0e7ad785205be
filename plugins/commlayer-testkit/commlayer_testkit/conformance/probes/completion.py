"""Experiments on completion: when it comes, who learns of it, and what a wait does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from commlayer.semantics import (
    Completion,
    NativeTimeout,
    Poll,
    PostMayBlock,
    Progress,
    WaitBlocks,
)
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Pair,
    unmeasured,
)
from commlayer_testkit.conformance.probes.facts import P2P
from commlayer_testkit.conformance.probes.rank import Concluded, ProbeRank, in_words
from commlayer_testkit.conformance.ranks.stopping import stopped

_SIZES = (8, 4096, 1 << 20)
_LARGE = 32 << 20
_LARGEST_EAGER = 64 << 20
_POSTS = (("first", 1), ("later", 1), ("later", 4096), ("later", 4 << 20))
_BRIEF = 0.2  # seconds of polling where an early yes would show at once


# --- poll ---------------------------------------------------------------------------------------


def _watch(here: ProbeRank, work: Any, seconds: float) -> dict[str, Any]:
    """Poll `work` for `seconds` or until it says yes: what it said.  Concludes if it blocks."""
    longest = 0.0

    def ask() -> bool:
        nonlocal longest
        started = time.monotonic()
        said = here.link.poll(work)
        longest = max(longest, time.monotonic() - started)
        return said

    attempt = here.attempt(here.until, ask, seconds, seconds=seconds + here.patience)
    if not attempt.ended or longest > here.patience / 2:
        here.note("blocks", f"a query of a pending operation: {attempt}")
        raise Concluded
    return {"yes": bool(attempt.value), "error": attempt.error}


def _poll_send(here: ProbeRank, size: int, patience: float) -> None:
    name = f"send of {in_words(size)}"
    if here.rank == 0:
        source = here.pattern(size, 1)
        work = here.link.isend(source)
        before = _watch(here, work, _BRIEF)
        if before["yes"]:
            source.fill_(0)
        here.tell(f"{name}/posted")
        here.hear(f"{name}/arrived")
        after = before if before["yes"] else _watch(here, work, patience)
        here.note(name, {"before": before, "after": after, "wait": str(here.settle(work))})
        here.note(f"{name}, after wait", here.link.poll(work))
    else:
        here.hear(f"{name}/posted")
        into = here.blank(size)
        here.settle(here.link.irecv(into), 10 * here.patience)
        here.note(f"{name} intact", here.holds(into, 1))
        here.tell(f"{name}/arrived")


def _poll_recv(here: ProbeRank, size: int, patience: float) -> None:
    name = f"receive of {in_words(size)}"
    if here.rank == 1:
        into = here.blank(size)
        work = here.link.irecv(into)
        before = _watch(here, work, _BRIEF)
        here.tell(f"{name}/posted")
        here.hear(f"{name}/sent")
        after = before if before["yes"] else _watch(here, work, patience)
        early = before["yes"] or (after["yes"] and not here.holds(into, 2))
        here.note(name, {"early": early, "after": after, "wait": str(here.settle(work))})
        here.note(f"{name}, after wait", here.link.poll(work))
    else:
        here.hear(f"{name}/posted")
        here.settle(here.link.isend(here.pattern(size, 2)), 10 * here.patience)
        here.tell(f"{name}/sent")


def _poll_in_flight(here: ProbeRank, size: int) -> None:
    """Act on the first yes, in the middle of a large transfer."""
    buffer = here.pattern(size, 3) if here.rank == 0 else here.blank(size)
    here.meet("large")
    work = here.link.isend(buffer) if here.rank == 0 else here.link.irecv(buffer)
    yes = _watch(here, work, here.patience)["yes"]
    if here.rank == 0:
        if yes:
            buffer.fill_(0)
        here.settle(work, 10 * here.patience)
    else:
        whole = yes and here.holds(buffer, 3)
        here.settle(work, 10 * here.patience)
        here.note("in flight", {"early": yes and not whole, "intact": here.holds(buffer, 3)})
    here.meet("large done")


def _play_poll(here: ProbeRank, variant: str) -> None:
    for number, size in enumerate(_SIZES):
        patience = here.patience if number == 0 else max(_BRIEF, here.patience / 4)
        _poll_send(here, size, patience)
        _poll_recv(here, size, patience)
    _poll_in_flight(here, _LARGE)


def _judge_poll(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender, receiver = outcomes[""]
    if blocked := [rank["blocks"] for rank in (sender, receiver) if rank.get("blocks")]:
        return {"poll": Measurement(Poll.BLOCKS, tuple(blocked))}
    sends = {size: sender[f"send of {in_words(size)}"] for size in _SIZES}
    receives = {size: receiver[f"receive of {in_words(size)}"] for size in _SIZES}
    seen = [*sends.values(), *receives.values()]
    in_flight = receiver["in flight"]
    overwritten = [s for s in _SIZES if not receiver[f"send of {in_words(s)} intact"]]
    early_receives = [size for size in _SIZES if receives[size]["early"]]
    if overwritten or early_receives or in_flight["early"] or not in_flight["intact"]:
        found = (
            f"yes although the source was still read: {_sizes(overwritten)}",
            f"yes although the data was not there: {_sizes(early_receives)}",
            f"acting on a yes in {in_words(_LARGE)} in flight: "
            + ("intact" if in_flight["intact"] and not in_flight["early"] else "damaged"),
        )
        return {"poll": Measurement(Poll.MAY_BE_EARLY, found, len(seen) + 1)}
    told = [note["after"]["yes"] for note in seen]
    afterwards = [
        outcome.get(f"{what} of {in_words(size)}, after wait")
        for outcome, what in ((sender, "send"), (receiver, "receive"))
        for size in _SIZES
    ]
    compared = (
        f"{sum(told)} of {len(told)} operations ({_sizes(_SIZES)}, both ways) said yes "
        "after delivery and before a wait",
        f"after the wait {sum(map(bool, afterwards))} of {len(afterwards)} did; never early",
    )
    value = Poll.EXACT if all(told) else Poll.NEVER_BEFORE_WAIT
    return {"poll": Measurement(value, compared, len(seen) + 1)}


def _sizes(sizes: Any) -> str:
    return ", ".join(map(in_words, sizes)) or "never"


# --- what a wait does ---------------------------------------------------------------------------


def _play_wait_blocks(here: ProbeRank, variant: str) -> None:
    """Wait for a message that is sent one `patience` later."""
    if here.rank == 1:
        work = here.link.irecv(here.blank(64))
        here.tell("waiting")
        attempt = here.attempt(here.link.wait, work, seconds=10 * here.patience)
        at_once = attempt.seconds < here.patience / 2
        here.note("wait", {"error": attempt.error, "at once": at_once, "said": str(attempt)})
    else:
        here.hear("waiting")
        time.sleep(here.patience)
        here.settle(here.link.isend(here.pattern(64, 1)))
    here.meet("done")


def _judge_wait_blocks(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    wait = outcomes[""][1]["wait"]
    evidence = f"wait of a receive whose message is sent later: {wait['said']}"
    if wait["error"]:
        return {"wait_blocks": unmeasured("the wait raises", evidence)}
    value = WaitBlocks.STREAM if wait["at once"] else WaitBlocks.HOST
    return {"wait_blocks": Measurement(value, (evidence,))}


def _play_wait_repeatable(here: ProbeRank, variant: str) -> None:
    buffer = here.pattern(64, 1) if here.rank == 0 else here.blank(64)
    work = here.link.isend(buffer) if here.rank == 0 else here.link.irecv(buffer)
    first = here.settle(work, 10 * here.patience)
    here.note("first", str(first))
    here.meet("first")
    second = here.settle(work)
    here.note("second", {"ok": second.ok, "said": str(second)})


def _judge_wait_repeatable(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    ranks = outcomes[""]
    for outcome in ranks:
        outcome["first"]
    blocked = {"ok": False, "said": "never returned"}
    seconds = [outcome.get("second", blocked) for outcome in ranks]
    evidence = (
        f"second wait of a send: {seconds[0]['said']}",
        f"second wait of a receive: {seconds[1]['said']}",
    )
    value = all(second["ok"] for second in seconds)
    return {"wait_repeatable": Measurement(value, evidence, 2)}


def _play_timeout(here: ProbeRank, variant: str) -> None:
    """Let a limit expire on one of two pending operations, then complete everything."""
    link = here.link
    buffers = [here.pattern(64, seed) if here.rank == 0 else here.blank(64) for seed in (1, 2, 3)]
    sends = here.rank == 0
    if sends == (variant == "send"):
        works = [link.isend(b) if sends else link.irecv(b) for b in buffers[:2]]
        if not link.limits_waits(works[0]):
            here.note("no limit", type(works[0]).__name__)
            return
        expired = here.attempt(link.wait_within, works[0], 0.1)
        here.note("expired", {"ended": expired.ended, "ok": expired.ok, "said": str(expired)})
        here.tell("expired")
        again = here.settle(works[0])
        other = here.settle(works[1])
        post = here.attempt(lambda: link.isend(buffers[2]) if sends else link.irecv(buffers[2]))
        new = here.settle(post.value) if post.ok else post
        here.note("again", {"ok": again.ok, "said": str(again)})
        here.note("other", {"ok": other.ok, "said": str(other)})
        here.note("new", {"ok": new.ok, "said": str(new)})
    else:
        here.hear("expired")
        for buffer in buffers:
            post = here.attempt(lambda b=buffer: link.isend(b) if sends else link.irecv(b))
            if post.ok:
                here.settle(post.value, 2 * here.patience)
    here.meet("data")
    if not sends:
        here.note("intact", [here.holds(b, s) for s, b in enumerate(buffers, 1)])


def _judge_timeout(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    values: list[NativeTimeout] = []
    evidence: list[str] = []
    for variant, ranks in outcomes.items():
        waiter = ranks[0] if variant == "send" else ranks[1]
        if work := waiter.get("no limit"):
            why = f"the wait of {work} takes no limit that can be set from outside the plugin"
            return {"timeout": unmeasured(why)}
        expired = waiter["expired"]
        evidence.append(f"{variant}, wait limited to 0.1 s: {expired['said']}")
        if expired["ok"]:
            return {"timeout": unmeasured("the wait returns before completion", *evidence)}
        if not expired["ended"]:
            values.append(NativeTimeout.IGNORED)
            continue
        later = [waiter.get(name, {}) for name in ("again", "other", "new")]
        unharmed = all(note.get("ok") for note in later) and all(ranks[1].get("intact", [False]))
        values.append(NativeTimeout.SAFE if unharmed else NativeTimeout.DESTRUCTIVE)
        if not unharmed:
            evidence += [
                f"{what}: {note['said']}"
                for what, note in zip(
                    ("the same again", "another pending one", "a new one"), later, strict=True
                )
                if note and not note["ok"]
            ][:2]
        else:
            evidence.append("the same, another pending one and a new one then completed, intact")
    order = list(NativeTimeout)
    return {"timeout": Measurement(min(values, key=order.index), tuple(evidence), len(values))}


# --- when a send completes ----------------------------------------------------------------------


def _play_eager(here: ProbeRank, variant: str) -> None:
    """Bisect over sizes: does the wait return although the peer has not posted?"""
    patience = max(_BRIEF, here.patience / 2)
    if here.rank == 0:
        small, large = 0, _LARGEST_EAGER + 1
        size, step, pending = 1, 0, []
        while size < large and size > small:
            work = here.link.isend(here.pattern(size, 1))
            pending.append(work)
            eager = here.completes(work, patience)
            here.note(f"step {step}", [size, eager])
            here.tell(f"step {step}", size)
            here.hear(f"step {step}/received")
            step += 1
            small, large = (size, large) if eager else (small, size)
            doubling = size * 16 if eager and large > _LARGEST_EAGER else (small + large) // 2
            size = min(doubling, _LARGEST_EAGER)
        here.tell(f"step {step}", 0)
        here.note("eager", small)
    else:
        step = 0
        while size := int(here.hear(f"step {step}")):
            here.settle(here.link.irecv(here.blank(size)), 10 * here.patience)
            here.tell(f"step {step}/received")
            step += 1


def _judge_eager(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender = outcomes[""][0]
    eager = sender["eager"]
    steps = [note for name, note in sender.notes.items() if name.startswith("step")]
    refused = [size for size, yes in steps if not yes]
    evidence = (
        f"largest that completed without a receive: {in_words(eager) if eager else 'none'}",
        f"smallest that did not: {in_words(min(refused)) if refused else 'none'}",
    )
    return {"eager_bytes": Measurement(eager, evidence, len(steps))}


def _play_completion(here: ProbeRank, variant: str) -> None:
    """Complete a small send whose receiver has not posted, or has posted and then stopped."""
    if here.rank == 1:
        if variant == "posted":
            work = here.link.irecv(here.blank(64))
            here.tell("stops", here.pid)
            os.kill(here.pid, signal.SIGSTOP)
        else:
            here.hear("waited")
            work = here.link.irecv(here.blank(64))
        here.settle(work, 10 * here.patience)
        return
    if variant == "posted":
        peer = int(here.hear("stops"))
        here.until(lambda: stopped(peer), 10 * here.patience)
        here.note("complete", here.completes(here.link.isend(here.pattern(64, 1))))
        os.kill(peer, signal.SIGCONT)
    else:
        work = here.link.isend(here.pattern(64, 1))
        here.note("complete", here.completes(work))
        here.tell("waited")


def _judge_completion(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    unposted = outcomes["not posted"][0]["complete"]
    unread = outcomes["posted"][0]["complete"]
    beyond_local = Completion.MATCHED if unread else Completion.DELIVERED
    value = Completion.LOCAL if unposted else beyond_local
    evidence = (
        f"send of 64 B, peer has not posted: {'complete' if unposted else 'not complete'}",
        f"peer has posted and is stopped: {'complete' if unread else 'not complete'}",
    )
    return {"completion": Measurement(value, evidence, 2)}


# --- posting, and progress without calls --------------------------------------------------------


def _play_post(here: ProbeRank, variant: str) -> None:
    """Post sends that nobody has asked for, on a pair used for the first time and after that."""
    for when, size in _POSTS:
        name = f"{when} {size}"
        if here.rank == 0:
            attempt = here.attempt(here.link.isend, here.pattern(size, 1))
            note = {"ended": attempt.ended, "error": attempt.error, "seconds": attempt.seconds}
            here.note(name, note)
            here.meet(name)
            here.until(partial(getattr, attempt, "ended"), 10 * here.patience)
            if attempt.ok:
                here.settle(attempt.value, 10 * here.patience)
        else:
            here.meet(name)
            here.settle(here.link.irecv(here.blank(size)), 10 * here.patience)
        here.meet(f"{name} done")


def _judge_post(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender = outcomes[""][0]
    posts = {f"{when} {size}": sender[f"{when} {size}"] for when, size in _POSTS}
    if errors := [note["error"] for note in posts.values() if note["error"]]:
        return {"post_may_block": unmeasured(f"posting raises: {errors[0]}")}
    blocked = [name for name, note in posts.items() if not note["ended"]]
    longest = max(note["seconds"] for note in posts.values())
    evidence = f"longest of {len(posts)} posts of 1 B to 4 MiB without a receive: {longest:.4f} s"
    if not blocked:
        value = PostMayBlock.NEVER
    elif all(name.startswith("first") for name in blocked):
        value = PostMayBlock.FIRST_USE
    else:
        value = PostMayBlock.ALWAYS
    return {"post_may_block": Measurement(value, (evidence,), len(posts))}


def _play_progress(here: ProbeRank, variant: str) -> None:
    """Post on both sides, then call nothing: do the bytes arrive?"""
    size = 4 << 20
    receiver_first = variant == "receiver first"
    if here.rank == 0:
        if receiver_first:
            here.hear("receiving")
        work = here.link.isend(here.pattern(size, 1))
        here.tell("sending")
        here.hear("looked")
        here.settle(work)
    else:
        if not receiver_first:
            here.hear("sending")
        into = here.blank(size)
        work = here.link.irecv(into)
        here.tell("receiving")
        here.hear("sending")
        started = time.monotonic()
        arrived = here.until(lambda: here.holds(into, 1))
        here.note("arrived", {"yes": arrived, "seconds": time.monotonic() - started})
        here.tell("looked")
        here.settle(work)


def _judge_progress(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    seen = {variant: ranks[1]["arrived"] for variant, ranks in outcomes.items()}
    evidence = tuple(
        f"4 MiB, {variant}, no call after posting: "
        + (f"arrived after {note['seconds']:.3f} s" if note["yes"] else "did not arrive")
        for variant, note in seen.items()
    )
    autonomous = all(note["yes"] for note in seen.values())
    value = Progress.AUTONOMOUS if autonomous else Progress.ONLY_IN_CALLS
    return {"progress": Measurement(value, evidence, len(seen))}


EXPERIMENTS = (
    Experiment(("poll",), _play_poll, _judge_poll),
    Experiment(("wait_blocks",), _play_wait_blocks, _judge_wait_blocks),
    Experiment(("wait_repeatable",), _play_wait_repeatable, _judge_wait_repeatable),
    Experiment(("timeout",), _play_timeout, _judge_timeout, ("send", "receive")),
    Experiment(("eager_bytes",), _play_eager, _judge_eager),
    Experiment(("completion",), _play_completion, _judge_completion, ("not posted", "posted")),
    Experiment(("post_may_block",), _play_post, _judge_post),
    Experiment(
        ("progress",),
        _play_progress,
        _judge_progress,
        ("sender first", "receiver first"),
        kinds=(P2P,),
        whole_transport=("progress",),
    ),
)
