"""One simulated operation, and the work object that its caller holds."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from commlayer.semantics import DroppedWork, NativeTimeout, OperationSemantics, Poll, WaitBlocks
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.streams import Item, SimStream
from commlayer_testkit.sim.world import EVERYTHING, memory_bit, site

if TYPE_CHECKING:
    import torch

    from commlayer_testkit.sim.memory import Buffer
    from commlayer_testkit.sim.transport import SimEndpoint


class Operation(Item):
    """One send, receive or broadcast of one rank, from post to completion.

    Its life is a set of separate facts: `started` (its turn came), `matched`,
    `reading` and `read` (source read begun and ended), and `complete`, what its
    work means by completion.  What a poll says is none of them.
    """

    __slots__ = ("began", "buffer", "complete", "dropped_at", "endpoint", "error",
                 "facts", "group", "kind", "lost", "matched", "on_stream", "partner",
                 "payload", "peer", "read", "reading", "snapshot", "started", "tag", "title",
                 "waited", "waits", "what")  # fmt: skip

    def __init__(
        self, endpoint: SimEndpoint, kind: str, peer: int, tag: int, facts: OperationSemantics
    ) -> None:
        world = endpoint.world
        self.endpoint = endpoint
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.facts = facts
        self.buffer: Buffer
        self.snapshot: bytes | None = None
        self.payload: bytes | None = None
        self.partner: Operation | None = None
        self.group: object = None
        self.started = self.matched = self.reading = self.read = False
        self.complete = self.lost = self.on_stream = self.began = False
        self.dropped_at = ""
        self.waits = 0
        self.waited = False
        self.error: str | None = None
        self.title = world.running.label if world.running is not None else ""
        if world.explain:
            self.title = f"{self.title or kind} posted at {site()}"
        self.what = f"rank {endpoint.rank} {kind}"

    def disturbed(self) -> bool:
        """Whether the source of a send is gone or not what was posted."""
        buffer = self.buffer
        if not buffer.alive():
            return True
        return self.snapshot is not None and buffer.peek() != self.snapshot

    def report_loss(self) -> None:
        """The message of this operation will never be delivered."""
        what = f"{self.describe()}: its work was dropped while pending{self.dropped_at}"
        self.endpoint.world.lost.append(what)

    def done(self) -> bool:
        return self.complete or self.error is not None

    # -- as an entry of an in-order stream --------------------------------------

    def ready(self) -> bool:
        return not self.began or self.done()

    def run(self) -> bool:
        if not self.began:
            self.began = True
            self.endpoint.start(self)
        return self.done()

    # -- wait-for graph ---------------------------------------------------------

    def describe(self) -> str:
        endpoint = self.endpoint
        arrow = {"send": "to", "recv": "from"}.get(self.kind, "root")
        name = f"rank {endpoint.rank} {self.kind} {arrow} {self.peer} on {endpoint.name!r}"
        if endpoint.network.semantics.tags and self.kind != "broadcast":
            name += f" tag {self.tag}"
        title = f" [{self.title}]" if self.title else ""
        state = self.error or (
            "complete" if self.complete
            else "lost: its work was dropped" if self.lost
            else "matched" if self.matched
            else "not matched" if self.started
            else "not started"
        )  # fmt: skip
        return f"{name}{title}, {self.buffer.nbytes} B ({state})"

    def waits_for(self) -> list[object]:
        return self.endpoint.blockers(self)


class SimWork:
    """The native work object: what it says and does follows the profile's facts."""

    __slots__ = ("__weakref__", "_tensor", "operation")

    def __init__(self, operation: Operation, tensor: torch.Tensor | None) -> None:
        self.operation = operation
        self._tensor = tensor

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block as `wait_blocks` says; raises `RuntimeError` as the native wait does."""
        operation = self.operation
        endpoint, facts = operation.endpoint, operation.facts
        world = endpoint.world
        if isinstance(timeout, timedelta):
            timeout = timeout.total_seconds()
        if facts.timeout is NativeTimeout.IGNORED:
            timeout = None
        operation.waits += 1
        if operation.waits > 1 and not facts.wait_repeatable:
            return self._wait_again()
        if facts.wait_blocks is WaitBlocks.STREAM and operation.on_stream:
            world.point()
            self._order(endpoint.rank_object.device.current_stream())
            return True
        endpoint.enter()
        try:
            in_time = world.block(operation.done, "waits for", operation, timeout)
        finally:
            endpoint.leave()
        if not in_time and facts.timeout is NativeTimeout.DESTRUCTIVE:
            endpoint.destroy(f"the timeout of a wait on rank {endpoint.rank} expired")
        if operation.error is not None:
            raise RuntimeError(operation.error)
        if not in_time:
            operation.waits -= 1
            raise RuntimeError(f"wait timed out after {timeout} s: {operation.describe()}")
        operation.waited = True
        return True

    def _wait_again(self) -> bool:
        """What a second wait does where waits are not repeatable: it takes the group with it."""
        operation = self.operation
        endpoint = operation.endpoint
        endpoint.world.block(
            lambda: operation.error is not None,
            "waits a second time for", operation, endpoint.network.profile.group_timeout,
        )  # fmt: skip
        endpoint.destroy(f"{operation.describe()} was waited twice")
        raise RuntimeError(operation.error or endpoint.broken)

    def _order(self, stream: SimStream) -> None:
        stream.enqueue(_AfterOperation(self.operation))

    def is_completed(self) -> bool:
        """What the transport's poll says."""
        operation = self.operation
        endpoint, facts = operation.endpoint, operation.facts
        world = endpoint.world
        endpoint.check_thread()
        world.point()
        world.touch(reads=EVERYTHING)
        endpoint.drive()
        said = False
        if facts.poll is Poll.BLOCKS:
            world.block(operation.done, "blocks in a poll of", operation)
            said = True
        elif facts.poll is Poll.EXACT:
            said = operation.complete
        elif facts.poll is Poll.NEVER_BEFORE_WAIT:
            said = operation.waited
        else:
            said = operation.complete or (operation.started and world.choose(2) == 1)
        if operation.error is not None:
            if facts.errors_polled:
                raise RuntimeError(operation.error)
            return False
        if not said:
            world.spin(operation)
        return said

    def exception(self) -> RuntimeError | None:
        error = self.operation.error
        return None if error is None else RuntimeError(error)

    def __del__(self) -> None:
        operation = self.operation
        endpoint = operation.endpoint
        world = endpoint.world
        if world.closing or operation.facts.dropped_work is not DroppedWork.LOSES_MESSAGE:
            return
        world.touch(writes=memory_bit(endpoint.rank))
        if not operation.matched and not operation.done():
            operation.lost = True
            operation.dropped_at = f", dropped at {site()}" if world.explain else ""
            world.version += 1
            if operation.kind == "send":
                operation.report_loss()

    def __repr__(self) -> str:
        return f"<SimWork {self.operation.describe()}>"


class _AfterOperation(Item):
    __slots__ = ("operation",)
    what = "a stream's wait"

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def ready(self) -> bool:
        return self.operation.done()

    def run(self) -> bool:
        if self.operation.error is not None:
            world = self.operation.endpoint.world
            world.fail(FailureKind.ERROR, self.operation.error, unwind=False)
        return True

    def waits_for(self) -> list[object]:
        return [self.operation]
