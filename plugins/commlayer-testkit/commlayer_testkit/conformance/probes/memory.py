"""Experiments on memory: what is read when, what is kept, and what fits into what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from commlayer.semantics import DroppedWork, SizeMismatch, SourceLifetime
from commlayer_testkit.conformance.probes.bench import Bench, in_words
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Missing,
    Pair,
    unmeasured,
)

_SMALL, _LARGE = 64, 1 << 20


# --- dropped work -------------------------------------------------------------------------------


class _Watched:
    """A tensor in memory that outlives it, and whether its storage has been freed.

    Whoever still reads or writes the memory after that does so for real, and
    harmlessly.  Device memory cannot be lent like that and is not watched.
    """

    def __init__(self, bench: Bench, content: torch.Tensor) -> None:
        self._device = bench.link.device
        self.freed = False
        self.memory = bytearray(content.cpu().numpy().tobytes()) if self._device == "cpu" else None
        if self.memory is not None:
            content = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.tensor: torch.Tensor | None = content
        weakref.finalize(content.untyped_storage(), self._free)

    def _free(self) -> None:
        self.freed = True

    def drop(self) -> None:
        self.tensor = None
        gc.collect()

    def equals(self, content: torch.Tensor) -> bool:
        assert self.memory is not None
        return self.memory == content.numpy().tobytes()

    def scribble(self) -> None:
        assert self.memory is not None
        self.memory[:] = b"\xff" * len(self.memory)


def _play_dropped(bench: Bench, variant: str) -> None:
    """Drop work and tensor of a pending operation, then complete it from the other side."""
    what, _, size = variant.partition(" ")
    drops = bench.rank == (0 if what == "send" else 1)
    (_drop if drops else _complete_dropped)(bench, what, int(size))


def _drop(bench: Bench, what: str, size: int) -> None:
    content = bench.pattern(size, 1)
    watched = _Watched(bench, content if what == "send" else bench.blank(size))
    post = bench.link.isend if what == "send" else bench.link.irecv
    assert watched.tensor is not None
    work = post(watched.tensor)
    del work
    watched.drop()
    churn = [bench.blank(size) for _ in range(16)]
    bench.note("freed", watched.freed)
    if watched.freed and what == "send":
        watched.scribble()
    bench.tell("dropped")
    if what == "receive":
        _await_dropped_receive(bench, watched, content)
    second = bench.pattern(size, 2) if what == "send" else bench.blank(size)
    attempt = bench.attempt(lambda: bench.link.wait(post(second)), seconds=3 * bench.patience)
    bench.note("next", str(attempt))
    if what == "receive":
        bench.note("next intact", attempt.ok and bench.holds(second, 2))
    del churn


def _complete_dropped(bench: Bench, what: str, size: int) -> None:
    """Serve the operation that the other rank has dropped, and the one behind it."""
    bench.hear("dropped")
    post = bench.link.irecv if what == "send" else bench.link.isend
    for name, seed in (("message", 1), ("next", 2)):
        buffer = bench.blank(size) if what == "send" else bench.pattern(size, seed)
        attempt = bench.attempt(lambda b=buffer: bench.link.wait(post(b)))
        if what == "send":
            intact = "ok" if bench.holds(buffer, seed) else f"wrong, {attempt}"
            bench.note(name, intact if attempt.ok else f"lost, {attempt}")


def _await_dropped_receive(bench: Bench, watched: _Watched, content: torch.Tensor) -> None:
    if watched.memory is None:
        bench.note("message", "unknown")
        return
    arrived = bench.until(lambda: watched.equals(content))
    bench.note("message", "ok" if arrived else "lost, nothing arrived")


def _judge_dropped(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    values, evidence = [], []
    for variant, ranks in outcomes.items():
        sends = variant.startswith("send")
        dropper, receiver = ranks[0 if sends else 1], ranks[1]
        freed = dropper["freed"]
        dead = [outcome for outcome in ranks if outcome.ended == "died"]
        message = receiver.get("message", "lost, never came")
        if dead or message.startswith("wrong") or (freed and message == "ok" and not sends):
            values.append(DroppedWork.UNSAFE)
        elif message == "ok" and _next_intact(variant, ranks):
            values.append(DroppedWork.CONTINUES)
        else:
            values.append(DroppedWork.LOSES_MESSAGE)
        size = in_words(int(variant.split()[1]))
        later = "the next one arrived" if _next_intact(variant, ranks) else "the next one hung"
        state = f"memory {'freed' if freed else 'kept'}"
        fate = dead[0].ending if dead else f"message {message.split(',')[0]}"
        evidence.append(f"{variant.split()[0]} of {size} dropped: {state}, {fate}, {later}")
    value = min(values, key=list(DroppedWork).index)
    return {"dropped_work": Measurement(value, tuple(evidence), len(values))}


def _next_intact(variant: str, ranks: Pair) -> bool:
    if variant.startswith("send"):
        return bool(ranks[1].get("next") == "ok")
    return bool(ranks[1].get("next intact"))


# --- source -------------------------------------------------------------------------------------


def _play_source(bench: Bench, variant: str) -> None:
    """Overwrite a source right after posting it; see which bytes travel, and who keeps it."""
    for size in (16, _LARGE):
        if bench.rank == 0:
            source = bench.pattern(size, 1)
            work = bench.link.isend(source)
            source.copy_(bench.pattern(size, 2))
            freed: list[bool] = []
            weakref.finalize(source.untyped_storage(), freed.append, True)
            del source
            gc.collect()
            bench.note(f"freed {size}", bool(freed))
            bench.meet(f"overwritten {size}")
            bench.settle(work, 10 * bench.patience)
        else:
            bench.meet(f"overwritten {size}")
            into = bench.blank(size)
            bench.settle(bench.link.irecv(into), 10 * bench.patience)
            got = "old" if bench.holds(into, 1) else "new" if bench.holds(into, 2) else "mixed"
            bench.note(f"got {size}", got)
    bench.note("device", bench.link.device)


def _judge_source(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender, receiver = outcomes[""]
    evidence = tuple(
        f"{in_words(size)} overwritten after posting: the peer got the {receiver[f'got {size}']} "
        f"bytes; the work {'does not keep' if sender[f'freed {size}'] else 'keeps'} the tensor"
        for size in (16, _LARGE)
    )
    if sender["device"] != "cpu":
        return {"source_lifetime": unmeasured("needs a view into the device allocator", *evidence)}
    return {"source_lifetime": Measurement(SourceLifetime.REFERENCE, evidence, 2)}


# --- sizes, layouts, dtypes ---------------------------------------------------------------------


def _play_mismatch(bench: Bench, variant: str) -> None:
    size = 8 if variant.startswith("too small") else 32
    sender_first = variant.endswith("sender first")
    if bench.rank == 0:
        if not sender_first:
            bench.hear("posted")
        work = bench.link.isend(bench.pattern(16, 1))
        bench.tell("posted")
        bench.note("send", str(bench.settle(work)))
    else:
        if sender_first:
            bench.hear("posted")
        attempt = bench.attempt(_receive, bench, size)
        bench.note("receive", {"error": attempt.error, "said": str(attempt)})


def _receive(bench: Bench, size: int) -> None:
    work = bench.link.irecv(bench.blank(size))
    bench.tell("posted")
    bench.link.wait(work)


def _judge_mismatch(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    values, evidence = [], []
    for variant, ranks in outcomes.items():
        dead = [outcome for outcome in ranks if outcome.ended == "died"]
        if dead:
            values.append(SizeMismatch.ABORTS)
            evidence.append(f"{variant}: rank {dead[0].rank} {dead[0].ending}")
            continue
        receive = ranks[1]["receive"]
        values.append(SizeMismatch.ERROR if receive["error"] else SizeMismatch.SILENT)
        evidence.append(f"{variant}: the receive {receive['said']}")
    value = min(values, key=list(SizeMismatch).index)
    return {"size_mismatch": Measurement(value, tuple(evidence), len(values))}


def _play_contiguous(bench: Bench, variant: str) -> None:
    """Move every second byte of a buffer, without packing it first."""
    strided = bench.rank == (0 if variant == "send" else 1)
    if bench.rank == 0:
        source = bench.pattern(64, 1)
        if strided:
            wide = bench.blank(128)
            wide[::2] = source
            source = wide[::2]
        attempt = bench.attempt(lambda: bench.link.wait(bench.link.isend(source)))
    else:
        into = bench.blank(128)[::2] if strided else bench.blank(64)
        attempt = bench.attempt(lambda: bench.link.wait(bench.link.irecv(into)))
        bench.note("arrived", attempt.ok)
        bench.note("intact", attempt.ok and bench.holds(into, 1))
    bench.note("said", str(attempt))
    bench.meet("done")


def _judge_contiguous(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    intact = {variant: ranks[1].get("intact", False) for variant, ranks in outcomes.items()}
    evidence = tuple(
        f"strided {variant}: {outcomes[variant][variant != 'send']['said']}"
        + (", intact" if ok else ", wrong bytes" if outcomes[variant][1].get("arrived") else "")
        for variant, ok in intact.items()
    )
    return {"contiguous_only": Measurement(not all(intact.values()), evidence, len(intact))}


def dtypes_that_can_travel() -> dict[str, torch.dtype]:
    """Every dtype of this torch by name, but quantised ones and those smaller than a byte."""
    names = {str(v).removeprefix("torch."): v for v in vars(torch).values() if _is_plain(v)}
    return dict(sorted(names.items()))


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.dtype):
        return False
    name = str(value).removeprefix("torch.")
    whole = all(name != f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
    return whole and not name.startswith(("q", "bits", "float4"))


def _play_dtypes(bench: Bench, variant: str) -> None:
    for tag, (name, dtype) in enumerate(dtypes_that_can_travel().items()):
        buffer = bench.pattern(64, tag) if bench.rank == 0 else bench.blank(64)
        post = bench.link.isend if bench.rank == 0 else bench.link.irecv
        attempt = bench.attempt(lambda p=post, b=buffer, d=dtype: bench.link.wait(p(b.view(d))))
        intact = attempt.ok and bench.holds(buffer, tag)
        bench.note(name, {"intact": intact, "said": str(attempt)})
        bench.tell(f"{name}/{bench.rank}", attempt.ended)
        if not attempt.ended or bench.hear(f"{name}/{1 - bench.rank}") != "True":
            return


def _judge_dtypes(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    sender, receiver = outcomes[""]
    tried = dtypes_that_can_travel()
    seen = {name: receiver.get(name) for name in tried}
    if not any(seen.values()):
        raise Missing(f"no dtype could be tried: rank 1 {receiver.ending}")
    carried = tuple(name for name, note in seen.items() if note and note["intact"])
    failed = [name for name, note in seen.items() if note and not note["intact"]]
    untried = [name for name, note in seen.items() if not note]
    evidence = [f"{len(carried)} of {len(tried)} carried intact"]
    if failed:
        said: Any = sender.get(failed[0], seen[failed[0]])
        evidence.append(f"not: {', '.join(failed)}; {failed[0]}: {said['said']}")
    if untried:
        evidence.append(f"not tried after that: {', '.join(untried)}")
    value = None if len(carried) == len(tried) else carried
    return {"dtypes": Measurement(value, tuple(evidence), len(tried))}


EXPERIMENTS = (
    Experiment(
        ("dropped_work",),
        _play_dropped,
        _judge_dropped,
        tuple(f"{what} {size}" for what in ("send", "receive") for size in (_SMALL, _LARGE)),
    ),
    Experiment(("source_lifetime",), _play_source, _judge_source),
    Experiment(
        ("size_mismatch",),
        _play_mismatch,
        _judge_mismatch,
        tuple(
            f"{what}, {who} first"
            for what in ("too small", "too large")
            for who in ("sender", "receiver")
        ),
    ),
    Experiment(("contiguous_only",), _play_contiguous, _judge_contiguous, ("send", "receive")),
    Experiment(("dtypes",), _play_dtypes, _judge_dtypes),
)
