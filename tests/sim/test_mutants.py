"""The scenarios of the core can fail: each of these small mistakes in it is found."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from commlayer_testkit.sim import FailureKind, explore
from commlayer_testkit.sim.transport import SimEndpoint

from commlayer.lanes.receiving import RecvLane
from commlayer.lanes.sending import SendLane
from commlayer.observe.inquiry import Inquiry, _Mailbox
from commlayer.progress.ledger import Ledger


def mutated(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """`function` with `old` replaced by `new` in its source."""
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{function.__qualname__} has changed: mutate it anew"
    names: dict[str, Any] = {}
    code = compile(source.replace(old, new), inspect.getfile(function), "exec", flags=0x1000000)
    exec(code, function.__globals__, names)
    return names[function.__name__]  # type: ignore[no-any-return]


MUTANTS = {
    "a wake-up can be lost": (
        RecvLane, "wake", "self._wake.set()", "pass",
        "core_tags_independent", "gloo", {FailureKind.DEADLOCK},
    ),
    "complete before the native wait": (
        SendLane, "steps",
        "yield step\n", "self._context.ledger.complete(posted.operation); yield step\n",
        "core_wait_usable", "gloo", {FailureKind.OVERWRITTEN},
    ),
    "works are not kept": (
        SendLane, "_post_native",
        "works.append(isend(message, peer, tag))", "isend(message, peer, tag)",
        "core_dropped_handle", "gloo", {FailureKind.LOST_MESSAGE},
    ),
    "works and sources are not kept where that is unsafe": (
        SendLane, "_post_native",
        "works.append(isend(message, peer, tag))", "isend(message, peer, tag)",
        "core_dropped_handle", "adversary", {FailureKind.USE_AFTER_FREE},
    ),
    "messages are taken last in, first out": (
        RecvLane, "claim",
        "self._arrived.popleft()", "self._arrived.pop()",
        "core_unexpected", "gloo", {FailureKind.ERROR},
    ),
    "the bound does not bind": (
        Ledger, "_has_room", "return ", "return True or ",
        "core_bounded", "gloo", {FailureKind.ERROR},
    ),
    "two threads post at once": (
        SendLane, "_enqueue", "if self._poster is None:", "if True:",
        "core_two_threads_post", "gloo", {FailureKind.ERROR, FailureKind.DEADLOCK},
    ),
    "a question that waits is never asked": (
        _Mailbox, "_left", "if message is not None:", "if False:",
        "core_reports", "gloo", {FailureKind.ERROR},
    ),
    "an answer is to one question": (
        Inquiry, "_heard", "number <= message.number", "number == message.number",
        "core_reports", "gloo", {FailureKind.ERROR},
    ),
    "each work is waited twice": (
        SimEndpoint, "wait", "work.wait()", "work.wait(); work.wait()",
        "core_one_each_way", "gloo", {FailureKind.ERROR, FailureKind.DEADLOCK},
    ),
    "a drain does not wait": (
        Ledger, "drain", "if not self.wait(operation, deadline.remaining()):", "if False:",
        "core_drain", "gloo", {FailureKind.ERROR},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, old, new, scenario, on, kinds = MUTANTS[name]
    assert explore(scenario, on=on, strategy="random", budget=20).failure is None
    monkeypatch.setattr(owner, method, mutated(getattr(owner, method), old, new))
    report = explore(scenario, on=on, strategy="random", budget=600, shrink=False)
    assert report.failure is not None, str(report)
    assert report.failure.kind in kinds, str(report)
