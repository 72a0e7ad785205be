"""Experiments on memory: what is read when, what is kept, and what fits into what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping

import torch

from commlayer.semantics import DroppedWork, SizeMismatch, SourceLifetime
from commlayer_testkit.conformance.probes.experiment import (
    Experiment,
    Measurement,
    Pair,
    unmeasured,
)
from commlayer_testkit.conformance.probes.rank import ProbeRank, in_words

_SMALL, _LARGE = 64, 1 << 20


# --- dropped work -------------------------------------------------------------------------------


class _Watched:
    """A tensor in memory that outlives it, and whether its storage has been freed.

    Whoever still reads or writes the memory after that does so for real, and
    harmlessly.  Device memory cannot be lent like that and is not watched.
    """

    def __init__(self, here: ProbeRank, content: torch.Tensor) -> None:
        self._device = here.link.device
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


def _play_dropped(here: ProbeRank, variant: str) -> None:
    """Drop work and tensor of a pending operation, then complete it from the other side."""
    what, _, size = variant.partition(" ")
    drops = here.rank == (0 if what == "send" else 1)
    (_drop if drops else _complete_dropped)(here, what, int(size))


def _drop(here: ProbeRank, what: str, size: int) -> None:
    content = here.pattern(size, 1)
    watched = _Watched(here, content if what == "send" else here.blank(size))
    post = here.link.isend if what == "send" else here.link.irecv
    assert watched.tensor is not None
    work = post(watched.tensor)
    del work
    watched.drop()
    churn = [here.blank(size) for _ in range(16)]
    here.note("freed", watched.freed)
    if watched.freed and what == "send":
        watched.scribble()
    here.tell("dropped")
    if what == "receive":
        _await_dropped_receive(here, watched, content)
    second = here.pattern(size, 2) if what == "send" else here.blank(size)
    attempt = here.attempt(lambda: here.link.wait(post(second)), seconds=3 * here.patience)
    here.note("next", str(attempt))
    if what == "receive":
        here.note("next intact", attempt.ok and here.holds(second, 2))
    del churn


def _complete_dropped(here: ProbeRank, what: str, size: int) -> None:
    """Serve the operation that the other rank has dropped, and the one behind it."""
    here.hear("dropped")
    post = here.link.irecv if what == "send" else here.link.isend
    for name, seed in (("message", 1), ("next", 2)):
        buffer = here.blank(size) if what == "send" else here.pattern(size, seed)
        attempt = here.attempt(lambda b=buffer: here.link.wait(post(b)))
        if what == "send":
            intact = "ok" if here.holds(buffer, seed) else f"wrong, {attempt}"
            here.note(name, intact if attempt.ok else f"lost, {attempt}")


def _await_dropped_receive(here: ProbeRank, watched: _Watched, content: torch.Tensor) -> None:
    if watched.memory is None:
        here.note("message", "unknown")
        return
    arrived = here.until(lambda: watched.equals(content))
    here.note("message", "ok" if arrived else "lost, nothing arrived")


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


def _play_source(here: ProbeRank, variant: str) -> None:
    """Overwrite a source right after posting it; see which bytes travel, and who keeps it."""
    for size in (16, _LARGE):
        if here.rank == 0:
            source = here.pattern(size, 1)
            work = here.link.isend(source)
            source.copy_(here.pattern(size, 2))
            freed: list[bool] = []
            weakref.finalize(source.untyped_storage(), freed.append, True)
            del source
            gc.collect()
            here.note(f"freed {size}", bool(freed))
            here.meet(f"overwritten {size}")
            here.settle(work, 10 * here.patience)
        else:
            here.meet(f"overwritten {size}")
            into = here.blank(size)
            here.settle(here.link.irecv(into), 10 * here.patience)
            got = "old" if here.holds(into, 1) else "new" if here.holds(into, 2) else "mixed"
            here.note(f"got {size}", got)
    here.note("device", here.link.device)


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


# --- sizes and layouts ---------------------------------------------------------------------------


def _play_mismatch(here: ProbeRank, variant: str) -> None:
    size = 8 if variant.startswith("too small") else 32
    sender_first = variant.endswith("sender first")
    if here.rank == 0:
        if not sender_first:
            here.hear("posted")
        work = here.link.isend(here.pattern(16, 1))
        here.tell("posted")
        here.note("send", str(here.settle(work)))
    else:
        if sender_first:
            here.hear("posted")
        attempt = here.attempt(_receive, here, size)
        here.note("receive", {"error": attempt.error, "said": str(attempt)})


def _receive(here: ProbeRank, size: int) -> None:
    work = here.link.irecv(here.blank(size))
    here.tell("posted")
    here.link.wait(work)


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


def _play_contiguous(here: ProbeRank, variant: str) -> None:
    """Move every second byte of a buffer, without packing it first."""
    strided = here.rank == (0 if variant == "send" else 1)
    if here.rank == 0:
        source = here.pattern(64, 1)
        if strided:
            wide = here.blank(128)
            wide[::2] = source
            source = wide[::2]
        attempt = here.attempt(lambda: here.link.wait(here.link.isend(source)))
    else:
        into = here.blank(128)[::2] if strided else here.blank(64)
        attempt = here.attempt(lambda: here.link.wait(here.link.irecv(into)))
        here.note("arrived", attempt.ok)
        here.note("intact", attempt.ok and here.holds(into, 1))
    here.note("said", str(attempt))
    here.meet("done")


def _judge_contiguous(outcomes: Mapping[str, Pair]) -> dict[str, Measurement]:
    intact = {variant: ranks[1].get("intact", False) for variant, ranks in outcomes.items()}
    evidence = tuple(
        f"strided {variant}: {outcomes[variant][variant != 'send']['said']}"
        + (", intact" if ok else ", wrong bytes" if outcomes[variant][1].get("arrived") else "")
        for variant, ok in intact.items()
    )
    return {"contiguous_only": Measurement(not all(intact.values()), evidence, len(intact))}


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
)
