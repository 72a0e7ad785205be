"""What a stall report says, and how it is printed."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from commlayer.wire.rank_state import PendingOperation, RankState

SHOWN_OPERATIONS = 5
"""How many operations of a rank, or of a finding, are printed; all are in the report."""
SHOWN_FINDINGS = 4


class Case(str, Enum):
    """What may be wrong, most telling first; docs/stuck.md explains each."""

    PEER_SILENT = "peer-silent"
    """A rank that others wait for does not answer."""
    BROADCAST_MISMATCH = "broadcast-mismatch"
    """Ranks have called broadcast different numbers of times on one channel."""
    BROADCAST_SOURCE = "broadcast-source"
    """Ranks name different sources for the same broadcast."""
    WRONG_LANE = "wrong-lane"
    """Both sides wait, on different lanes: kind of call, tag, channel or order differ."""
    CYCLE = "cycle"
    """Ranks wait for each other in a circle."""
    FOREIGN_CALL = "foreign-call"
    """A rank that others wait for is inside a call of torch.distributed."""
    BOUND_REACHED = "bound-reached"
    """A thread waits for room under the bounds on operations and bytes in flight."""
    NEVER_RECEIVED = "never-received"
    """A rank has not asked for a message that was sent to it."""
    NEVER_SENT = "never-sent"
    """A rank has not sent what another receives."""
    TRANSFER = "transfer"
    """Both sides have posted, and the transport has not completed it."""
    TRACKED = "tracked"
    """Work that was handed to `track` is not complete."""
    IDLE = "idle"
    """Receives were posted ahead and nobody waits for them."""


REMEDIES = {
    Case.BROADCAST_MISMATCH: "Have every rank call broadcast equally often and in the same order "
    "on a channel; look for a condition that only some ranks evaluate to true",
    Case.BROADCAST_SOURCE: "Have every rank pass the same src for the same broadcast",
    Case.WRONG_LANE: "Have both ranks use the same kind of call, channel and tag, in one order",
    Case.CYCLE: "Post receives before waiting for a send, and sends before waiting for a receive; "
    "give traffic that must not wait for other traffic its own channel; where a broadcast is part "
    "of the circle, see whether a rank has skipped it",
    Case.PEER_SILENT: "See whether that process runs: stopped (SIGSTOP, a debugger), a thread that "
    "does not release the interpreter, a host that cannot be reached; it answers only in calls on "
    "a transport that moves only in calls",
    Case.FOREIGN_CALL: "Have every rank of that call's group reach it, in the same order relative "
    "to the operations above",
    Case.BOUND_REACHED: "See why the receiver of the oldest send does not receive, or raise "
    "max_inflight_ops or max_inflight_bytes",
    Case.NEVER_RECEIVED: "Post the receive, or do not send; see what that rank does instead",
    Case.NEVER_SENT: "Send it, or do not receive; see what that rank does instead. Receives that "
    "may wait for ever belong on a channel with may_idle = true",
    Case.TRANSFER: "A slow or broken link, or a transport that needs calls to move; see the "
    "transport's own log",
    Case.TRACKED: "See what the tracked work waits for",
    Case.IDLE: "Nothing to do if nothing was due; receives that may wait for ever belong on a "
    "channel with may_idle = true",
}


Missing = Literal["post", "transfer", "answer"]
"""What a wait is for: the peer's side, the end of a transfer, or a peer that says nothing."""


class RankWait(msgspec.Struct, frozen=True):
    """`rank` waits for `peer`."""

    rank: int
    peer: int
    operation: PendingOperation
    missing: Missing


class Finding(msgspec.Struct, frozen=True):
    """One case that the ranks' states agree with, in a line, and the operations that show it."""

    case: Case
    ranks: tuple[int, ...]
    text: str
    details: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.case]


class Report(msgspec.Struct, frozen=True):
    """Who waits for whom, since when and why, as rank `rank` of connection `name` sees it.

    `states` are those of the ranks that answered, this one included, and `silent`
    the ranks that did not.  `waits` are the edges of the wait-for graph among
    operations older than `older_than` seconds, `cycles` the circles in it, each
    from its lowest rank, and `findings` what may be wrong, most likely first.
    ``str(report)`` is the text that is logged.
    """

    name: str
    rank: int
    world_size: int
    reason: str
    older_than: float
    states: tuple[RankState, ...]
    silent: tuple[int, ...]
    waits: tuple[RankWait, ...]
    cycles: tuple[tuple[int, ...], ...]
    findings: tuple[Finding, ...]

    @property
    def case(self) -> Case | None:
        """The most likely case, or ``None`` where nothing waits for too long."""
        return self.findings[0].case if self.findings else None

    def __str__(self) -> str:
        return "\n".join([self._head(), *self._found(), *self._ranks()])

    def _head(self) -> str:
        where = f"connection {self.name}, rank {self.rank} of {self.world_size}"
        return f"commlayer report ({where}): {self.reason}"

    def _found(self) -> list[str]:
        if not self.findings:
            return [f"  nothing has waited for {self.older_than:g} s"]
        lines = []
        for number, finding in enumerate(self.findings[:SHOWN_FINDINGS]):
            mark = "most likely" if number == 0 else "also"
            lines.append(f"  {mark}: {finding.text} [{finding.case.value}]")
            lines += [f"    {detail}" for detail in finding.details[:SHOWN_OPERATIONS]]
            lines.append(f"    What to do: {finding.remedy}.")
        if len(self.findings) > SHOWN_FINDINGS:
            lines.append(f"  and {len(self.findings) - SHOWN_FINDINGS} more findings")
        return lines

    def _ranks(self) -> list[str]:
        lines = []
        for state in self.states:
            lines.append(f"  {_whereabouts(state)}: {_summary(state)}")
            shown = state.operations[:SHOWN_OPERATIONS]
            lines += [f"    {seconds(each.age):>8}  {describe(each)}" for each in shown]
            rest = len(state.operations) - len(shown) + state.omitted
            if rest > 0:
                lines.append(f"    {'':>8}  and {rest} more")
            for lane in state.lanes:
                if lane.unclaimed:
                    lines.append(
                        f"    {'':>8}  {lane.unclaimed} unclaimed from rank {lane.peer} (channel "
                        f"{printable(lane.channel)}, tag {printable(lane.tag)})"
                    )
            for thread in state.threads:
                inside = f", in {printable(thread.call)}" if thread.call else ""
                lines.append(
                    f"    {'':>8}  thread {printable(thread.name)} at "
                    f"{printable(thread.site)}{inside}"
                )
        if self.silent:
            lines.append(f"  no answer from rank {', '.join(map(str, self.silent))}")
        return lines


def _whereabouts(state: RankState) -> str:
    return f"rank {state.rank} (pid {state.pid} on {printable(state.host)})"


def _summary(state: RankState) -> str:
    count = len(state.operations)
    text = f"{count or 'no'} operation{'' if count == 1 else 's'} pending"
    steps = ", ".join(f"{n} on channel {printable(channel)}" for channel, n in state.steps)
    return text + (f"; broadcasts so far: {steps}" if steps else "")


def describe(operation: PendingOperation) -> str:
    """The operation in words, in the same form as errors have it."""
    parts = [f"channel {printable(operation.channel)}", f"tag {printable(operation.tag)}"]
    if operation.direction != "track":
        parts.append(f"message {operation.number}")
    if operation.step >= 0:
        parts.append(f"broadcast {operation.step} of the channel")
    if operation.nbytes:
        parts.append(f"{operation.nbytes} bytes")
    if operation.site:
        parts.append(f"posted at {printable(operation.site)}")
    way = {"send": "to", "recv": "from", "track": "on"}[operation.direction]
    return f"{printable(operation.kind)} {way} rank {operation.peer} ({', '.join(parts)})"


def seconds(value: float) -> str:
    return f"{value:.1f} s"


def printable(text: str) -> str:
    """Text of a peer, fit to be logged on one line."""
    return "".join(char if char.isprintable() else "?" for char in text)
