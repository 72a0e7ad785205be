"""Run the stages of one rank for several batches in flight.

An engine adopts `StageLoop` whole, or keeps its own loop and gives each batch a
`BatchCalls`, which holds what the batch has on this rank between two calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from commlayer.errors import CommError, ErrorKind
from commlayer.handle import Handle
from commlayer.pipeline.topology import Link, Topology

Batch = TypeVar("Batch")
Activation = Mapping[str, Any]
"""What one stage hands to the next: a tensor dict."""

Compute = Callable[[Batch, int, "Activation | None"], Any]
"""``compute(batch, v, activation)`` runs virtual stage `v` of this rank.

`activation` is what the previous stage returned, ``None`` for the first.  It
returns an `Activation`, or for the last stage whatever the engine wants.
"""


class Channels(Protocol):
    """What is used of a `commlayer.Communicator`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def channel(self, name: str) -> Channels: ...
    def isend_tensor_dict(self, tensor_dict: Mapping[str, Any], dst: int) -> Handle: ...
    def irecv_tensor_dict(self, src: int) -> Handle: ...


class RankStages:
    """The stages of this rank, each with the channels and ranks it receives from and sends to.

    Raises `CommError` (CONFIG) when `topology` is made for another number of
    ranks, or uses a channel that was not named when the ranks connected.
    """

    def __init__(self, comm: Channels, topology: Topology) -> None:
        if comm.world_size != topology.ranks:
            raise CommError(
                ErrorKind.CONFIG,
                repr(topology),
                f"the communicator has {comm.world_size} ranks",
                "Make the topology for as many",
            )
        stages = range(topology.virtual_stages)
        self.calls = topology.calls(comm.rank)
        self._sources = [topology.receives(comm.rank, v) for v in stages]
        self._targets = [topology.sends(comm.rank, v) for v in stages]
        self._channels = {name: comm.channel(name) for name in topology.channels}

    def receive(self, v: int) -> Handle | None:
        """Post the receive of stage `v`'s activation, if another rank has it."""
        link: Link | None = self._sources[v]
        if link is None:
            return None
        return self._channels[link.channel].irecv_tensor_dict(link.rank)

    def send(self, v: int, activation: Activation) -> Handle | None:
        """Post the send of what stage `v` made, if another rank is to have it."""
        link: Link | None = self._targets[v]
        if link is None:
            return None
        return self._channels[link.channel].isend_tensor_dict(activation, link.rank)


class BatchCalls(Generic[Batch]):
    """One batch on this rank: which of its calls is next and what was received for it.

    Every rank makes these in the same order of batches, and for each sweep calls
    `post` and `run` in that order.  For one thread at a time.
    """

    def __init__(self, stages: RankStages, batch: Batch) -> None:
        self.batch = batch
        self.result: Any = None
        """What the last stage returned, on the rank that holds it."""
        self._stages = stages
        self._next = 0
        self._posted = False
        self._arriving: Handle | None = None

    @property
    def done(self) -> bool:
        """Whether no call is left on this rank."""
        return self._next == len(self._stages.calls)

    @property
    def call(self) -> int:
        """The number of the next call; the number of calls when done."""
        return self._next

    def post(self) -> None:
        """Post the receive that the next call needs, once.  Never blocks."""
        if not self._posted and not self.done:
            self._arriving = self._stages.receive(self._stages.calls[self._next][0])
            self._posted = True

    @property
    def ready(self) -> bool:
        """Whether the next call can run without waiting for another rank."""
        if not self._posted or self.done:
            return False
        return self._arriving is None or self._arriving.is_completed()

    def run(self, compute: Compute[Batch], timeout: float | None = None) -> Handle | None:
        """Run the next call: wait for its activation, compute its stages, send on.

        Returns the handle of the send, if there is one: wait for it before the
        activation is overwritten.  When `timeout` seconds pass before the
        activation is here, `CommTimeout` is raised; then, and when `compute`
        raises, nothing has changed and the call can be run again.
        """
        self.post()
        activation: Any = None
        if self._arriving is not None:
            activation = self._arriving.result(timeout)
        stages = self._stages.calls[self._next]
        for v in stages:
            activation = compute(self.batch, v, activation)
        sent = self._stages.send(stages[-1], activation)
        self._next += 1
        self._posted, self._arriving = False, None
        if self.done and sent is None:
            self.result = activation
        return sent


class StageLoop(Generic[Batch]):
    """Runs the calls of this rank for batches that are submitted in one order on all ranks.

    A step runs one call: a continuation that can run before a first call, so that
    batches are finished before others are begun; the oldest batch's, waiting for
    its activation, if none can.  Ranks need not take calls in the same order.
    No step blocks for ever while every rank goes on stepping: the oldest batch
    that is not finished anywhere always has a rank that waits for nothing else.

    That is why a rank must not stop with batches under way: its peers' messages
    would never be received.  `park` before idling.

    What `compute` returns must not be overwritten before it was sent; an engine that
    reuses its buffers takes `BatchCalls`, whose `run` gives the handle to wait for.

    For one thread at a time.
    """

    def __init__(self, comm: Channels, topology: Topology, compute: Compute[Batch]) -> None:
        self._stages = RankStages(comm, topology)
        self._compute = compute
        self._queues: tuple[deque[BatchCalls[Batch]], ...] = tuple(
            deque() for _ in self._stages.calls
        )
        self._sends: deque[Handle] = deque()
        self.finished: deque[BatchCalls[Batch]] = deque()
        """The batches that have no call left on this rank; the engine takes them out."""

    @property
    def pending(self) -> int:
        """Number of batches that have calls left on this rank."""
        return sum(map(len, self._queues))

    def submit(self, batch: Batch) -> None:
        """Take a batch in; nothing is computed yet.  All ranks submit the same, in one order."""
        self._queues[0].append(BatchCalls(self._stages, batch))
        self._queues[0][0].post()

    def step(self, timeout: float | None = None) -> None:
        """Run one call.

        Raises `CommTimeout` when its activation is not here after `timeout`
        seconds, which changes nothing, and `ValueError` when nothing is pending.
        """
        queue = self._choose()
        sent = queue[0].run(self._compute, timeout)
        calls = queue.popleft()
        if calls.done:
            self.finished.append(calls)
        else:
            self._queues[calls.call].append(calls)
        for waiting in self._queues:
            if waiting:
                waiting[0].post()
        if sent is not None:
            self._sends.append(sent)
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft()

    def _choose(self) -> deque[BatchCalls[Batch]]:
        """The queue whose first batch is next.  Later queues hold older batches."""
        waiting = [queue for queue in reversed(self._queues) if queue]
        if not waiting:
            raise ValueError("no batch is pending: submit one")
        return next((queue for queue in waiting if queue[0].ready), waiting[0])

    def park(self, timeout: float | None = None) -> None:
        """Finish every batch and every send; afterwards this rank may stop stepping.

        `timeout`, in seconds, is for each message that is waited for.  When it
        expires `CommTimeout` is raised, and parking may be tried again.
        """
        while self.pending:
            self.step(timeout)
        while self._sends:
            self._sends[0].synchronize(timeout)
            self._sends.popleft()
