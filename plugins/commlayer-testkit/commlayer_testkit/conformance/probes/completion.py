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
from commlayer_testkit.conformance.probes.bench import Bench, Concluded, in_words
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Pair,
    unmeasured,
)
from commlayer_testkit.conformance.probes.link import P2P
from commlayer_testkit.conformance.ranks.stopping import stopped

_SIZES = (8, 4096, 1 << 20)
_LARGE = 32 << 20
_LARGEST_EAGER = 64 << 20
_POSTS = (("first", 1), ("later", 1), ("later", 4096), ("later", 4 << 20))
_BRIEF = 0.2  # seconds of polling where an early yes would show at once


# --- poll ---------------------------------------------------------------------------------------


def _watch(bench: Bench, work: Any, seconds: float) -> dict[str, Any]:
    """Poll `work` for `seconds` or until it says yes: what it said.  Concludes if it blocks."""
    longest = 0.0

    def ask() -> bool:
        nonlocal longest
        started = time.monotonic()
        said = bench.link.poll(work)
        longest = max(longest, time.monotonic() - started)
        return said

    attempt = bench.attempt(bench.until, ask, seconds, seconds=seconds + bench.patience)
    if not attempt.ended or longest > bench.patience / 2:
        bench.note("blocks", f"a query of a pending operation: {attempt}")
        raise Concluded
    return {"yes": bool(attempt.value), "error": attempt.error}


def _poll_send(bench: Bench, size: int, patience: float) -> None:
    name = f"send of {in_words(size)}"
    if bench.rank == 0:
        source = bench.pattern(size, 1)
        work = bench.link.isend(source)
        before = _watch(bench, work, _BRIEF)
        if before["yes"]:
            source.fill_(0)
        bench.tell(f"{name}/posted")
        bench.hear(f"{name}/arrived")
        after = before if before["yes"] else _watch(bench, work, patience)
        bench.note(name, {"before": before, "after": after, "wait": str(bench.settle(work))})
        bench.note(f"{name}, after wait", bench.link.poll(work))
    else:
        bench.hear(f"{name}/posted")
        into = bench.blank(size)
        bench.settle(bench.link.irecv(into), 10 * bench.patience)
        bench.note(f"{name} intact", bench.holds(into, 1))
        bench.tell(f"{name}/arrived")


def _poll_recv(bench: Bench, size: int, patience: float) -> None:
    name = f"receive of {in_words(size)}"
    if bench.rank == 1:
        into = bench.blank(size)
        work = bench.link.irecv(into)
        before = _watch(bench, work, _BRIEF)
        bench.tell(f"{name}/posted")
        bench.hear(f"{name}/sent")
        after = before if before["yes"] else _watch(bench, work, patience)
        early = before["yes"] or (after["yes"] and not bench.holds(into, 2))
        bench.note(name, {"early": early, "after": after, "wait": str(bench.settle(work))})
        bench.note(f"{name}, after wait", bench.link.poll(work))
    else:
        bench.hear(f"{name}/posted")
        bench.settle(bench.link.isend(bench.pattern(size, 2)), 10 * bench.patience)
        bench.tell(f"{name}/sent")


def _poll_in_flight(bench: Bench, size: int) -> None:
    """Act on the first yes, in the middle of a large transfer."""
    buffer = bench.pattern(size, 3) if bench.rank == 0 else bench.blank(size)
    bench.meet("large")
    work = bench.link.isend(buffer) if bench.rank == 0 else bench.link.irecv(buffer)
    yes = _watch(bench, work, bench.patience)["yes"]
    if bench.rank == 0:
        if yes:
            buffer.fill_(0)
        bench.settle(work, 10 * bench.patience)
    else:
        whole = yes and bench.holds(buffer, 3)
        bench.settle(work, 10 * bench.patience)
        bench.note("in flight", {"early": yes and not whole, "intact": bench.holds(buffer, 3)})
    bench.meet("large done")


def _play_poll(bench: Bench, variant: str) -> None:
    for number, size in enumerate(_SIZES):
        patience = bench.patience if number == 0 else max(_BRIEF, bench.patience / 4)
        _poll_send(bench, size, patience)
        _poll_recv(bench, size, patience)
    _poll_in_flight(bench, _LARGE)


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


def _play_wait_blocks(bench: Bench, variant: str) -> None:
    """Wait for a message that is sent one `patience` later."""
    if bench.rank == 1:
        work = bench.link.irecv(bench.blank(64))
        bench.tell("waiting")
        attempt = bench.attempt(bench.link.wait, work, seconds=10 * bench.patience)
        at_once = attempt.seconds < bench.patience / 2
        bench.note("wait", {"error": attempt.error, "at once": at_once, "said": str(attempt)})
    else:
        bench.hear("waiting")
        time.sleep(bench.patience)
        bench.settle(bench.link.isend(bench.pattern(64, 1)))
    bench.meet("done")


def _judge_wait_blocks(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    wait = outcomes[""][1]["wait"]
    evidence = f"wait of a receive whose message is sent later: {wait['said']}"
    if wait["error"]:
        return {"wait_blocks": unmeasured("the wait raises", evidence)}
    value = WaitBlocks.STREAM if wait["at once"] else WaitBlocks.HOST
    return {"wait_blocks": Measurement(value, (evidence,))}


def _play_wait_repeatable(bench: Bench, variant: str) -> None:
    buffer = bench.pattern(64, 1) if bench.rank == 0 else bench.blank(64)
    work = bench.link.isend(buffer) if bench.rank == 0 else bench.link.irecv(buffer)
    first = bench.settle(work, 10 * bench.patience)
    bench.note("first", str(first))
    bench.meet("first")
    second = bench.settle(work)
    bench.note("second", {"ok": second.ok, "said": str(second)})


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


def _play_timeout(bench: Bench, variant: str) -> None:
    """Let a limit expire on one of two pending operations, then complete everything."""
    link = bench.link
    buffers = [
        bench.pattern(64, seed) if bench.rank == 0 else bench.blank(64) for seed in (1, 2, 3)
    ]
    sends = bench.rank == 0
    if sends == (variant == "send"):
        works = [link.isend(b) if sends else link.irecv(b) for b in buffers[:2]]
        if not link.limits_waits(works[0]):
            bench.note("no limit", type(works[0]).__name__)
            return
        expired = bench.attempt(link.wait_within, works[0], 0.1)
        bench.note("expired", {"ended": expired.ended, "ok": expired.ok, "said": str(expired)})
        bench.tell("expired")
        again = bench.settle(works[0])
        other = bench.settle(works[1])
        post = bench.attempt(lambda: link.isend(buffers[2]) if sends else link.irecv(buffers[2]))
        new = bench.settle(post.value) if post.ok else post
        bench.note("again", {"ok": again.ok, "said": str(again)})
        bench.note("other", {"ok": other.ok, "said": str(other)})
        bench.note("new", {"ok": new.ok, "said": str(new)})
    else:
        bench.hear("expired")
        for buffer in buffers:
            post = bench.attempt(lambda b=buffer: link.isend(b) if sends else link.irecv(b))
            if post.ok:
                bench.settle(post.value, 2 * bench.patience)
    bench.meet("data")
    if not sends:
        bench.note("intact", [bench.holds(b, s) for s, b in enumerate(buffers, 1)])


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


def _play_eager(bench: Bench, variant: str) -> None:
    """Bisect over sizes: does the wait return although the peer has not posted?"""
    patience = max(_BRIEF, bench.patience / 2)
    if bench.rank == 0:
        small, large = 0, _LARGEST_EAGER + 1
        size, step, pending = 1, 0, []
        while size < large and size > small:
            work = bench.link.isend(bench.pattern(size, 1))
            pending.append(work)
            eager = bench.completes(work, patience)
            bench.note(f"step {step}", [size, eager])
            bench.tell(f"step {step}", size)
            bench.hear(f"step {step}/received")
            step += 1
            small, large = (size, large) if eager else (small, size)
            doubling = size * 16 if eager and large > _LARGEST_EAGER else (small + large) // 2
            size = min(doubling, _LARGEST_EAGER)
        bench.tell(f"step {step}", 0)
        bench.note("eager", small)
    else:
        step = 0
        while size := int(bench.hear(f"step {step}")):
            bench.settle(bench.link.irecv(bench.blank(size)), 10 * bench.patience)
            bench.tell(f"step {step}/received")
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


def _play_completion(bench: Bench, variant: str) -> None:
    """Complete a small send whose receiver has not posted, or has posted and then stopped."""
    if bench.rank == 1:
        if variant == "posted":
            work = bench.link.irecv(bench.blank(64))
            bench.tell("stops", bench.pid)
            os.kill(bench.pid, signal.SIGSTOP)
        else:
            bench.hear("waited")
            work = bench.link.irecv(bench.blank(64))
        bench.settle(work, 10 * bench.patience)
        return
    if variant == "posted":
        peer = int(bench.hear("stops"))
        bench.until(lambda: stopped(peer), 10 * bench.patience)
        bench.note("complete", bench.completes(bench.link.isend(bench.pattern(64, 1))))
        os.kill(peer, signal.SIGCONT)
    else:
        work = bench.link.isend(bench.pattern(64, 1))
        bench.note("complete", bench.completes(work))
        bench.tell("waited")


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


def _play_post(bench: Bench, variant: str) -> None:
    """Post sends that nobody has asked for, on a pair used for the first time and after that."""
    for when, size in _POSTS:
        name = f"{when} {size}"
        if bench.rank == 0:
            attempt = bench.attempt(bench.link.isend, bench.pattern(size, 1))
            note = {"ended": attempt.ended, "error": attempt.error, "seconds": attempt.seconds}
            bench.note(name, note)
            bench.meet(name)
            bench.until(partial(getattr, attempt, "ended"), 10 * bench.patience)
            if attempt.ok:
                bench.settle(attempt.value, 10 * bench.patience)
        else:
            bench.meet(name)
            bench.settle(bench.link.irecv(bench.blank(size)), 10 * bench.patience)
        bench.meet(f"{name} done")


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


def _play_progress(bench: Bench, variant: str) -> None:
    """Post on both sides, then call nothing: do the bytes arrive?"""
    size = 4 << 20
    receiver_first = variant == "receiver first"
    if bench.rank == 0:
        if receiver_first:
            bench.hear("receiving")
        work = bench.link.isend(bench.pattern(size, 1))
        bench.tell("sending")
        bench.hear("looked")
        bench.settle(work)
    else:
        if not receiver_first:
            bench.hear("sending")
        into = bench.blank(size)
        work = bench.link.irecv(into)
        bench.tell("receiving")
        bench.hear("sending")
        started = time.monotonic()
        arrived = bench.until(lambda: bench.holds(into, 1))
        bench.note("arrived", {"yes": arrived, "seconds": time.monotonic() - started})
        bench.tell("looked")
        bench.settle(work)


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
