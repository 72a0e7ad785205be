"""A transport generated from facts: `commlayer.backend` on simulated lanes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from commlayer.backend import PLUGIN_API, Backend, Endpoint, Transport, Viability
from commlayer.backend import World as BackendWorld
from commlayer.semantics import (
    DroppedWork,
    OperationSemantics,
    Order,
    PeerLoss,
    PostMayBlock,
    Progress,
    Semantics,
    SourceLifetime,
    Threads,
    WaitBlocks,
)
from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.lane import Broadcast, Lane
from commlayer_testkit.sim.memory import Buffer
from commlayer_testkit.sim.operation import Operation, SimWork
from commlayer_testkit.sim.profiles import Profile
from commlayer_testkit.sim.streams import SimStream
from commlayer_testkit.sim.world import EVERYTHING, Actor, World, memory_bit, program_bit

if TYPE_CHECKING:
    from commlayer_testkit.sim.rank import Rank


class Network:
    """What connects all ranks of a world."""

    def __init__(self, world: World, profile: Profile) -> None:
        self.world = world
        self.profile = profile
        self.semantics: Semantics = profile.semantics
        self.endpoints: dict[tuple[str, int], SimEndpoint] = {}
        self.lanes: dict[tuple[str, int, int, int], Lane] = {}
        self.broadcasts: dict[tuple[str, int], Broadcast] = {}
        self.broken: dict[str, str] = {}
        self.used: set[tuple[str, int, int]] = set()
        """By what communicator which rank has called which."""
        self.making: dict[int, str] = {}
        self.begun: set[tuple[str, int]] = set()
        """The communicator that a rank makes now, and which ranks have begun to make which."""
        self.dead: set[int] = set()
        self.inside: defaultdict[int, int] = defaultdict(int)
        self._autonomous = profile.semantics.progress is Progress.AUTONOMOUS

    @property
    def size(self) -> int:
        return len(self.world.ranks)

    def lane(self, name: str, sender: int, receiver: int, tag: int) -> Lane:
        key = (name, sender, receiver, tag if self.semantics.tags else 0)
        lane = self.lanes.get(key)
        if lane is None:
            title = f"lane {name!r}" + (f" tag {tag}" if self.semantics.tags else "")
            lane = Lane(self, title, sender, receiver, self.world.bit())
            self.lanes[key] = lane
        return lane

    def broadcast(self, name: str, number: int) -> Broadcast:
        key = (name, number)
        if key not in self.broadcasts:
            title = f"broadcast {number} on {name!r}"
            self.broadcasts[key] = Broadcast(self, title, self.world.bit())
        return self.broadcasts[key]

    def footprint(self, rank: int) -> int:
        """What a step that reads the memory of `rank` reads."""
        return memory_bit(rank) if self._autonomous else memory_bit(rank) | program_bit(rank)

    def progresses(self, rank: int) -> bool:
        """Whether something drives the transport of `rank` now; leaving the process does."""
        if rank in self.dead:
            return False
        return self._autonomous or self.inside[rank] > 0 or not tasks_of(self.world, rank)

    def drive(self, rank: int) -> None:
        """A call of `rank` makes all the progress it can."""
        if self._autonomous:
            return
        self.world.touch(reads=EVERYTHING)
        for lane in list(self.lanes.values()):
            while lane.possible() and lane.needs() == rank and self.world.failure is None:
                self.world.touch(lane.writes, lane.reads)
                lane.step()
            injector = lane.injector
            while injector is not None and injector.sender == rank and injector.ready():
                self.world.touch(injector.writes, injector.reads)
                injector.step()

    def wedge(self, one: int, other: int) -> None:
        """Nothing more gets through between two ranks."""
        for (_, sender, receiver, _), lane in self.lanes.items():
            if {sender, receiver} == {one, other}:
                lane.wedged = True

    def kill(self, rank: int) -> None:
        """The process of `rank` is gone; its tasks must not run on."""
        self.world.touch(writes=EVERYTHING)
        self.dead.add(rank)
        for (_, sender, receiver, _), lane in self.lanes.items():
            if rank not in (sender, receiver):
                continue
            lane.wedged = True
            for operation in (*lane.sends, *lane.recvs):
                raises = operation.facts.peer_loss is PeerLoss.RAISES
                unmatched = operation.facts.peer_loss is PeerLoss.NEXT_POST_ONLY
                if raises or (unmatched and not operation.matched):
                    operation.error = f"Connection closed by peer {rank}"
        self.world.version += 1

    def close(self) -> None:
        self.endpoints.clear()
        self.lanes.clear()
        self.broadcasts.clear()


class SimEndpoint(Endpoint):
    """One rank's side of one native communicator."""

    def __init__(self, network: Network, name: str, rank: int) -> None:
        self.network = network
        self.world = network.world
        self.name = name
        self.rank = rank
        self.rank_object: Rank = network.world.ranks[rank]
        self._opener = network.world.running
        self._inside = 0
        self._outstanding: defaultdict[tuple[str, int, int], list[Operation]] = defaultdict(list)
        self._broadcasts = 0
        self._stream: SimStream | None = None
        self._pending: list[Operation] = []

    @property
    def broken(self) -> str:
        """Why the communicator can no longer be used, if so."""
        return self.network.broken.get(self.name, "")

    @property
    def stream(self) -> SimStream:
        """The communicator's own in-order stream."""
        if self._stream is None:
            self._stream = self.rank_object.device.stream(f"of {self.name!r}")
        return self._stream

    # -- commlayer.backend.Endpoint ---------------------------------------------

    def isend(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> SimWork:
        return self._post("send", tensor, dst, tag, self.network.semantics.p2p)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> SimWork:
        return self._post("recv", tensor, src, tag, self.network.semantics.p2p)

    def broadcast(self, tensor: torch.Tensor, src: int) -> SimWork:
        """Post this rank's part of the communicator's next broadcast."""
        return self._post("broadcast", tensor, src, 0, self.network.semantics.collective)

    def wait(self, work: SimWork) -> None:
        work.wait()

    def poll(self, work: SimWork) -> bool:
        return work.is_completed()

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Blocking, as the native `send` is."""
        self.isend(tensor, dst, tag).wait()

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> None:
        """Blocking, as the native `recv` is."""
        self.irecv(tensor, src, tag).wait()

    # -- posting ------------------------------------------------------------------

    def _post(
        self, kind: str, tensor: torch.Tensor, peer: int, tag: int, facts: OperationSemantics
    ) -> SimWork:
        world, network = self.world, self.network
        if facts.contiguous_only and not tensor.is_contiguous():
            raise ValueError("tensors must be contiguous")
        if self.broken:
            raise RuntimeError(self.broken)
        self.check_thread()
        world.point()
        world.version += 1
        if peer in network.dead and facts.peer_loss is not PeerLoss.SILENT:
            raise RuntimeError(f"Connection closed by peer {peer}")
        operation = Operation(self, kind, peer, tag, facts)
        streamed = facts.order is Order.IN_ORDER_STREAM
        keeps = facts.dropped_work is DroppedWork.CONTINUES and not streamed
        rank = self.rank_object
        operation.buffer = Buffer(
            world, tensor, operation.describe, hold=keeps, arena=rank.arena_used
        )
        block = operation.buffer.block
        reads_source = kind == "send" or (kind == "broadcast" and peer == self.rank)
        if block is None and reads_source:
            operation.snapshot = operation.buffer.peek()
            world.sources.setdefault(self.rank, []).append(operation)
        elif block is not None and not reads_source:
            block.incoming = (operation.buffer.issued, operation.describe())
        self._count(operation)
        self._pending.append(operation)
        world.note(f"rank {self.rank}", f"post {kind}", operation.describe())
        if streamed:
            self._enqueue(operation, tensor)
        else:
            self.start(operation)
        owns = facts.dropped_work is DroppedWork.LOSES_MESSAGE
        work = SimWork(operation, tensor if owns else None)
        self.drive()
        if kind != "broadcast":
            self._hold_up(operation)
        return work

    def _enqueue(self, operation: Operation, tensor: torch.Tensor) -> None:
        facts, device = operation.facts, self.rank_object.device
        stream = self.stream
        operation.on_stream = True
        if facts.wait_blocks is WaitBlocks.STREAM:
            current = device.current_stream()
            self.world.touch(reads=current.writes)
            if current.queue:
                stream.wait_stream(current)
            if facts.source_lifetime is SourceLifetime.RECORD_STREAM:
                device.record_stream(tensor, stream)
        stream.enqueue(operation)

    def start(self, operation: Operation) -> None:
        """Its turn has come: it can be matched from now on."""
        operation.started = True
        network = self.network
        if network.profile.watchdog is not None and operation.on_stream:
            _Watchdog(operation, network.profile.watchdog)
        if operation.kind == "broadcast":
            broadcast = network.broadcast(self.name, self._broadcasts)
            self._broadcasts += 1
            self.world.touch(broadcast.writes)
            broadcast.join(operation)
            return
        sender, receiver = self.rank, operation.peer
        if operation.kind == "recv":
            sender, receiver = receiver, sender
        lane = network.lane(self.name, sender, receiver, operation.tag)
        if operation.facts.order is Order.UNORDERED:
            self.world.touch(lane.writes)
        lane.post(operation)

    def _hold_up(self, operation: Operation) -> None:
        """Hold the caller up as the facts allow; where every send may, it ordinarily does."""
        allowed = operation.facts.post_may_block
        if allowed is PostMayBlock.FIRST_USE:
            used, peer = self.network.used, operation.peer
            first = (self.name, self.rank, peer) not in used
            used.add((self.name, self.rank, peer))
            if first:
                self.world.touch(writes=EVERYTHING)
                self._block(operation, lambda: (self.name, peer, self.rank) in used)
        elif (
            allowed is PostMayBlock.ALWAYS and operation.kind == "send" and not self.world.choose(2)
        ):
            self._block(operation, lambda: operation.matched)

    def _block(self, operation: Operation, over: Callable[[], bool]) -> None:
        self.enter()
        try:
            self.world.block(lambda: over() or operation.done(), "blocks while posting", operation)
        finally:
            self.leave()

    def _count(self, operation: Operation) -> None:
        limit = operation.facts.max_outstanding_per_pair
        if not limit or operation.kind == "broadcast":
            return
        self.world.touch(reads=EVERYTHING)
        queue = self._outstanding[operation.kind, operation.peer, operation.tag]
        queue[:] = [o for o in queue if not o.done()]
        queue.append(operation)
        if len(queue) > limit:
            self.world.fail(
                FailureKind.MISUSE,
                f"more than {limit} outstanding per pair and tag: {operation.describe()}",
                tuple(o.describe() for o in queue[:-1]),
            )

    # -- calls --------------------------------------------------------------------

    def enter(self) -> None:
        """A call blocks inside the transport."""
        self.check_thread()
        self.network.inside[self.rank] += 1
        self._inside += 1

    def leave(self) -> None:
        self.network.inside[self.rank] -= 1
        self._inside -= 1

    def drive(self) -> None:
        self.network.drive(self.rank)

    def check_thread(self) -> None:
        """Fail on a call from a thread that the facts forbid."""
        threads, running = self.network.semantics.threads, self.world.running
        if threads is Threads.MULTIPLE or running is None or self.world.closing:
            return
        if threads is Threads.FUNNELED and running is not self._opener:
            what = "called from another thread than the one that opened it"
        elif self._inside > 0:
            what = "called while another thread is inside a call"
        else:
            return
        self.world.fail(
            FailureKind.MISUSE, f"rank {self.rank}: the transport was {what} ({running.name})"
        )

    def destroy(self, why: str) -> None:
        """Close every pair of the communicator, on all ranks."""
        self.world.touch(writes=EVERYTHING)
        self.network.broken[self.name] = f"the group {self.name!r} was closed: {why}"
        for (name, _), endpoint in self.network.endpoints.items():
            if name != self.name:
                continue
            for operation in endpoint._pending:
                if not operation.done():
                    operation.error = endpoint.broken
        for (name, *_), lane in self.network.lanes.items():
            if name == self.name:
                lane.stop()
        self.world.version += 1

    def pending(self) -> list[Operation]:
        """Operations that are not complete."""
        self._pending = [operation for operation in self._pending if not operation.done()]
        return self._pending

    # -- wait-for graph -----------------------------------------------------------

    def blockers(self, operation: Operation) -> list[object]:
        """What has to happen first: an earlier operation, the peer's, or the peer's code."""
        if operation.done():
            return []
        if not operation.started:
            return [item for item in list(self.stream.queue)[:1] if item is not operation]
        if operation.partner is not None:
            return []
        if isinstance(operation.group, Broadcast):
            return self._broadcast_blockers(operation, operation.group)
        peer = self.network.endpoints.get((self.name, operation.peer))
        wanted = "recv" if operation.kind == "send" else "send"
        if peer is not None:
            for other in peer.pending():
                same_tag = not self.network.semantics.tags or other.tag == operation.tag
                unmatched = other.partner is None and other is not operation
                if other.kind == wanted and other.peer == self.rank and same_tag and unmatched:
                    return [] if other.started else [other]
        return list(tasks_of(self.world, operation.peer))

    def _broadcast_blockers(self, operation: Operation, group: Broadcast) -> list[object]:
        found: list[object] = []
        for rank in group.missing():
            peer = self.network.endpoints.get((self.name, rank))
            queued = (
                [o for o in peer.pending() if o.kind == "broadcast" and not o.started]
                if peer
                else []
            )
            found += queued[:1] or list(tasks_of(self.world, rank))
        return found


def tasks_of(world: World, rank: int) -> list[Actor]:
    """The tasks of a rank that are no daemons: whoever would have to post."""
    from commlayer_testkit.sim.world import Task

    return [a for a in world.actors if isinstance(a, Task) and a.rank == rank and not a.daemon]


class _Watchdog(Actor):
    __slots__ = ("_operation",)

    def __init__(self, operation: Operation, limit: float) -> None:
        world = operation.endpoint.world
        super().__init__(world, f"watchdog of {operation.what}")
        self._operation = operation
        self.deadline = world.now + limit

    def ready(self) -> bool:
        if self._operation.done():
            self.deadline = None
            return False
        return self.deadline is not None and self.world.now >= self.deadline

    def step(self) -> None:
        from commlayer_testkit.sim.report import watchdog

        self.world.failure = self.world.failure or watchdog(self.world, self._operation)


class SimTransport(Transport):
    """One rank's transport."""

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank

    def endpoint(self, name: str) -> SimEndpoint:
        key = (name, self._rank)
        endpoint = self._network.endpoints.get(key)
        if endpoint is None:
            endpoint = SimEndpoint(self._network, name, self._rank)
            self._network.endpoints[key] = endpoint
        return endpoint


class SimBackend(Backend):
    """The backend of one world's profile."""

    name = "sim"
    plugin_api = (PLUGIN_API, PLUGIN_API)
    semantics = Semantics()

    def __init__(self, world: World, on: Profile | None = None) -> None:
        self.world = world
        self.profile = on or world.profile
        self.semantics = self.profile.semantics  # type: ignore[misc]

    def viability(self) -> Viability:
        return Viability(True, "the simulator runs anywhere")

    def open(self, world: BackendWorld, options: Mapping[str, Any]) -> Transport:
        return SimTransport(self.world.network(self.profile), world.rank)
