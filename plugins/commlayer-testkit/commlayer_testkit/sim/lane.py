"""The actors that move messages."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from commlayer.semantics import Completion, Order, SizeMismatch
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.operation import Operation
from commlayer_testkit.sim.world import Actor, memory_bit, program_bit

if TYPE_CHECKING:
    from commlayer_testkit.sim.transport import Network


def begin_read(operation: Operation) -> None:
    """Read the first half of the source."""
    operation.reading = True
    buffer = operation.buffer
    half = buffer.nbytes // 2
    operation.payload = buffer.read(0, half, operation.what)


def end_read(operation: Operation) -> None:
    """Read the rest, and fail if the source is not what was posted."""
    buffer = operation.buffer
    assert operation.payload is not None
    operation.payload += buffer.read(len(operation.payload), buffer.nbytes, operation.what)
    operation.read = True
    block, world = buffer.block, operation.endpoint.world
    changed = operation.snapshot is not None and operation.payload != operation.snapshot
    if block is not None and block.written > buffer.issued:
        changed = True
    if changed and world.failure is None:
        writer = block.written_at if block is not None else world.writer_of(buffer)
        world.fail(
            FailureKind.OVERWRITTEN,
            f"the source of {operation.describe()} changed between its post and its read",
            (f"written by {writer}",) if writer else (),
            unwind=False,
        )


def finish(operation: Operation) -> None:
    """The work is complete."""
    operation.complete = True
    operation.buffer.release()
    operation.endpoint.world.note(operation.what, "complete", operation.title)


class Injector(Actor):
    """Copies the sources of eager sends away, one after another, matched or not."""

    __slots__ = ("queue", "sender")

    def __init__(self, network: Network, name: str, sender: int, bit: int) -> None:
        super().__init__(
            network.world, f"{name} eager", writes=bit, reads=network.footprint(sender)
        )
        self.queue: deque[Operation] = deque()
        self.sender = sender

    def ready(self) -> bool:
        return bool(self.queue)

    def step(self) -> None:
        operation = self.queue[0]
        self.world.version += 1
        if not operation.reading:
            begin_read(operation)
            return
        self.queue.popleft()
        end_read(operation)
        if operation.facts.completion is Completion.LOCAL:
            finish(operation)


class Lane(Actor):
    """One pair's messages of one tag and direction, one transfer at a time."""

    __slots__ = ("_eager", "_moving", "_network", "_order", "_phases", "_receiver", "_sender",
                 "injector", "recvs", "sends", "wedged")  # fmt: skip

    def __init__(self, network: Network, name: str, sender: int, receiver: int, bits: int) -> None:
        facts = network.semantics.p2p
        sends, receives = network.footprint(sender), network.footprint(receiver)
        self._phases = (sends | receives, sends, program_bit(receiver) | receives)
        super().__init__(network.world, f"{name} {sender}>{receiver}", bits, reads=self._phases[0])
        self._network = network
        self._sender, self._receiver = sender, receiver
        self._order = facts.order
        self._eager = facts.eager_bytes
        self.sends: deque[Operation] = deque()
        self.recvs: deque[Operation] = deque()
        self._moving: Operation | None = None
        self.wedged = False
        self.injector = Injector(network, self.name, sender, bits) if self._eager else None

    def post(self, operation: Operation) -> None:
        if operation.kind == "recv":
            self.recvs.append(operation)
            return
        self.sends.append(operation)
        if self.injector is not None and operation.buffer.nbytes <= self._eager:
            self.injector.queue.append(operation)

    def stop(self) -> None:
        """The communicator is gone, and what is on its way with it."""
        self.wedged = True
        self._moving = None
        self.sends.clear()
        self.recvs.clear()

    def possible(self) -> bool:
        """Whether there is a next step, whoever makes progress."""
        if self._moving is not None:
            return True
        if self.wedged or not self.sends or not self.recvs:
            return False
        head = self.sends[0]
        return head.read or self.injector is None or head.buffer.nbytes > self._eager

    def needs(self) -> int:
        """The rank whose progress makes the next step."""
        moving = self._moving
        if moving is not None:
            return self._receiver if moving.read else self._sender
        return self._receiver if self.sends[0].read else self._sender

    def ready(self) -> bool:
        return self.possible() and self._network.progresses(self.needs())

    def step(self) -> None:
        self.world.version += 1
        send = self._moving
        if send is None:
            self._match()
        elif not send.read:
            end_read(send)
            if send.facts.completion is not Completion.DELIVERED:
                finish(send)
            self.reads = self._phases[2]
        else:
            self._deliver(send)
            self._moving = None
            self.reads = self._phases[0]

    def _match(self) -> None:
        at = self.world.choose(len(self.sends)) if self._order is Order.UNORDERED else 0
        send = self.sends[at]
        recv = self.recvs.popleft()
        del self.sends[at]
        send.matched = recv.matched = True
        send.partner, recv.partner = recv, send
        self.world.note(self.name, "match", send.title or recv.title)
        if send.lost or recv.lost:
            self._network.wedge(self._sender, self._receiver)
            send.matched = recv.matched = False
            if recv.lost:
                recv.report_loss()
            return
        self._moving = send
        if send.read:
            self.reads = self._phases[2]
            if send.facts.completion is Completion.MATCHED:
                finish(send)
        else:
            begin_read(send)
            self.reads = self._phases[1]

    def _deliver(self, send: Operation) -> None:
        recv = send.partner
        assert recv is not None
        assert send.payload is not None
        room, size = recv.buffer.nbytes, len(send.payload)
        if size > room:
            self._too_small(send, recv)
            return
        recv.buffer.write(send.payload, recv.what)
        block = recv.buffer.block
        if block is not None:
            block.incoming = None
        finish(recv)
        if not send.complete:
            finish(send)

    def _too_small(self, send: Operation, recv: Operation) -> None:
        what = f"{recv.describe()} is too small for {send.describe()}"
        policy = recv.facts.size_mismatch
        if policy is SizeMismatch.ABORTS:
            self.world.fail(
                FailureKind.ABORT, f"rank {self._receiver} aborts: {what}", unwind=False
            )
        elif policy is SizeMismatch.ERROR:
            recv.error = f"message truncated: {what}"
        else:
            assert send.payload is not None
            recv.buffer.write(send.payload[: recv.buffer.nbytes], recv.what)
            finish(recv)
        finish(send)


class Broadcast(Actor):
    """One broadcast of one communicator: every rank's operation of the same number."""

    __slots__ = ("_network", "_waiting", "members", "root", "served")

    def __init__(self, network: Network, name: str, bits: int) -> None:
        ranks = range(network.size)
        reads = sum(program_bit(rank) | memory_bit(rank) for rank in ranks)
        super().__init__(network.world, name, writes=bits, reads=reads)
        self._network = network
        self.members: dict[int, Operation] = {}
        self.root: Operation | None = None
        self.served = 0
        self._waiting: deque[Operation] = deque()

    def join(self, operation: Operation) -> None:
        self.members[operation.endpoint.rank] = operation
        operation.group = self
        if operation.endpoint.rank == operation.peer and self.root is None:
            self.root = operation
        else:
            self._waiting.append(operation)

    def agreed(self, operation: Operation) -> bool:
        return self.root is not None and operation.peer == self.root.peer

    def ready(self) -> bool:
        root = self.root
        if root is None or not self._waiting:
            return False
        return self.agreed(self._waiting[0]) and self._network.progresses(root.peer)

    def step(self) -> None:
        root = self.root
        assert root is not None
        self.world.version += 1
        if not root.reading:
            root.matched = True
            begin_read(root)
            return
        if not root.read:
            end_read(root)
            return
        operation = self._waiting.popleft()
        operation.matched = True
        assert root.payload is not None
        room, size = operation.buffer.nbytes, len(root.payload)
        if room != size and operation.facts.size_mismatch is SizeMismatch.ABORTS:
            self.world.fail(
                FailureKind.ABORT,
                f"rank {operation.endpoint.rank} aborts: {operation.describe()} "
                f"differs in size from {root.describe()}",
                unwind=False,
            )
            return
        if room != size and operation.facts.size_mismatch is SizeMismatch.ERROR:
            operation.error = f"message truncated: {operation.describe()}"
        else:
            operation.buffer.write(root.payload[:room], operation.what)
            if operation.buffer.block is not None:
                operation.buffer.block.incoming = None
            finish(operation)
        self.served += 1
        if self.served == self._network.size - 1:
            finish(root)

    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        return [rank for rank in range(self._network.size) if rank not in self.members]
