"""Sends, receives and broadcasts of one channel: from arguments to handles.

The order of what happens is the promise that nothing leaves the rank before everything was
checked.  An operation is made first, because every refusal names it; then the message is
encoded or the target checked; then the lane is looked up, which raises what has closed it;
then the ledger admits it, which may wait for room; and only then is anything posted.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from commlayer.config import CommConfig
from commlayer.device.reach import Memory
from commlayer.errors import CommError, ConfigError
from commlayer.handle import AllOf, Handle
from commlayer.lanes.claims import MessageClaim
from commlayer.lanes.connection import Connection
from commlayer.lanes.encode import Encoder
from commlayer.lanes.targets import Target
from commlayer.progress.completion import Waiting
from commlayer.progress.lifetime import Fingerprint
from commlayer.progress.operation import DevicePart, LaneKey, Operation, calling_site
from commlayer.progress.retention import DeviceHold
from commlayer.wire.frame import Kind
from commlayer.wire.integers import integer
from commlayer.wire.message import Outgoing
from commlayer.wire.modes import dispatch_modes, refuse_modes, transform
from commlayer.wire.tags import BARRIER, BROADCAST, MAX_TAG, SLICES, objects


@dataclass
class BroadcastState:
    """The broadcasts of one channel: how many there were, and the size declared for them.

    `at_most` is in bytes; -1 where none was declared.
    """

    step: int = 0
    at_most: int = -1


class Posting:
    """Posts the operations of one channel.

    `broadcasts` go to `broadcast_channel`, which may be another one.  All methods may be
    called from any thread and raise `CommError`.
    """

    def __init__(
        self,
        connection: Connection,
        encoder: Encoder,
        memory: Memory,
        config: CommConfig,
        device_hold: DeviceHold,
        completion: Waiting,
        channel: str,
        broadcast_channel: str,
        broadcasts: BroadcastState,
    ) -> None:
        self._connection = connection
        self._peers = connection.peers
        self._ledger = connection.ledger
        self._now = connection.runtime.now
        self._device = connection.device
        self._encoder = encoder
        self._memory = memory
        self._device_hold = device_hold
        self._completion = completion
        self._channel = channel
        self._broadcast_channel = broadcast_channel
        self._broadcasts = broadcasts
        self._name = config.own_name
        self._check_lifetime = config.check_lifetime
        self._sites = config.record_sites or config.check_lifetime
        self._exempt = channel in config.unbounded_channels
        self._keys: dict[tuple[int, str, bool, int | str], LaneKey] = {}

    # Sends and receives

    def send(self, call: str, kind: Kind, value: Any, dst: int, tag: int | str) -> Handle:
        """Post a send of `value` to rank `dst`."""
        operation = self.operation(call, dst, "send", kind, tag)
        outgoing = self._encoder.encode(operation, kind, value)
        key = operation.lane
        peer = self._peers[key.peer]
        error = peer.closed or peer.error
        if error is not None:
            raise error.concerning(operation)
        name = key.channel, key.tag
        lane = peer.sends.get(name) or peer.open_send_lane(name)
        try:
            self._admit(operation, outgoing)
            lane.post(operation, outgoing)
        except BaseException as error:
            # A signal handler may raise at any point: what has not been entered has not happened.
            if isinstance(error, CommError) or operation.driven is None:
                self._ledger.remove(operation)
            raise
        return self._handle(operation)

    def receive(
        self, call: str, kind: Kind, src: int, tag: int | str, target: Tensor | None = None
    ) -> Handle:
        """Post a receive from rank `src`, into `target` or new memory."""
        operation = self.operation(call, src, "recv", kind, tag)
        if target is not None:
            self._memory.check_target(target, operation)
        return self.receive_claim(self._claim(operation, kind, target))

    def receive_claim(self, claim: MessageClaim) -> Handle:
        """Post the receive that `claim` asks for."""
        operation = claim.operation
        key = operation.lane
        try:
            lane = self._peers[key.peer].open_recv_lane((key.channel, key.tag))
        except CommError as error:
            raise error.concerning(operation) from error.__cause__
        try:
            self._ledger.admit(operation)
            handle = self._handle(operation) if operation.step >= 0 else self._held(operation)
            lane.claim(claim)
            return handle
        except BaseException as error:
            # Without a handle the next message would go to nobody.
            lane.take_back(claim)
            if isinstance(error, CommError) or operation.driven is None:
                self._ledger.remove(operation)
            raise

    def operation(
        self, call: str, peer: int, direction: str, kind: Kind, tag: int | str
    ) -> Operation:
        """A new operation with `peer` on the lane of `kind` and `tag`, which are checked.

        Objects and dicts have lanes of their own, and so have slices and barriers.
        """
        alone = kind is Kind.TENSOR
        # True == 1: only an int may find the key of an int.
        known = type(peer) is int and type(tag) is int
        key = self._keys.get((peer, direction, alone, tag)) if known else None
        if key is None:
            if tag is SLICES or tag is BARRIER:
                name = tag
            else:
                name = checked_tag(tag) if alone else objects(checked_tag(tag))
            key = LaneKey(self._channel, self.checked_peer(peer, call), direction, name)
            if known:
                self._keys[peer, direction, alone, tag] = key
        return self._make(call, key)

    def checked_peer(self, rank: int, call: str) -> int:
        """`rank` as an int; raises `ConfigError` unless it is another rank."""
        rank = self._checked_rank(rank, call)
        if self._connection.size == 1:
            raise ConfigError(call, "this is the only rank: there is no peer", "")
        if rank == self._connection.rank:
            raise ConfigError(
                call, f"rank {rank} is this rank itself", "Keep what stays on the rank in memory"
            )
        return rank

    def _checked_rank(self, rank: int, call: str) -> int:
        size = self._connection.size
        number = integer(rank)
        if number is None or not 0 <= number < size:
            raise ConfigError(
                call,
                f"{rank!r} is not a rank of this communicator",
                f"Ranks are local to it: 0 to {size - 1}",
            )
        return number

    def _make(self, call: str, lane: LaneKey) -> Operation:
        site = calling_site() if self._sites else None
        operation = Operation(call, lane, 0, self._now(), site)
        operation.connection = self._name
        # Asked here and not there, because it is asked for every operation.
        if dispatch_modes() or transform() is not None:
            refuse_modes(operation)
        device = self._device
        if device is not None:
            operation.device = DevicePart(self._device_hold)
            operation.notify = device.notify
            device.advance()
        return operation

    def _claim(
        self,
        operation: Operation,
        kind: Kind,
        target: Tensor | None = None,
        at_most: int = -1,
        step: int = -1,
    ) -> MessageClaim:
        into = None if target is None else self._target(operation, target)
        return MessageClaim(operation, kind, step, into, at_most)

    def _target(self, operation: Operation, tensor: Tensor) -> Target:
        """`tensor`, which was checked, to be received into after what this thread has queued."""
        side = self._device
        if side is None or not side.device.holds(tensor):
            return Target(tensor, None)
        assert operation.device is not None
        operation.device.after = side.here()
        return Target(tensor, side.device.copy)

    def targets(self, into: Mapping[str, Tensor], operation: Operation) -> dict[str, Target]:
        """What to receive tensors of a dict into, by key; raises `CommError` for what cannot be."""
        if not isinstance(into, Mapping) or not all(type(key) is str for key in into):
            raise ConfigError(
                operation.describe(),
                "into is a mapping of the dict's keys to tensors",
                "Pass {key: tensor}",
            )
        targets, taken = {}, set()
        for key, tensor in into.items():
            self._memory.check_target(tensor, operation)
            place = tensor.device, tensor.data_ptr()
            if tensor.numel() and place in taken:
                raise ConfigError(
                    operation.describe(),
                    f"{key!r} is to be received where another tensor is",
                    "Give each tensor memory of its own",
                )
            taken.add(place)
            targets[key] = self._target(operation, tensor)
        return targets

    def _admit(self, operation: Operation, outgoing: Outgoing) -> None:
        operation.nbytes = outgoing.nbytes
        self._ledger.admit(operation, exempt=self._exempt)
        if self._check_lifetime:
            operation.fingerprint = Fingerprint(outgoing.payload)

    def _handle(self, operation: Operation) -> Handle:
        return Handle(operation, self._completion)

    def _held(self, operation: Operation) -> Handle:
        """The handle of a receive, which the ledger can see to be dropped."""
        handle = Handle[Any](operation, self._completion)
        operation.holder = weakref.ref(handle)
        return handle

    # Broadcasts

    def broadcast(
        self,
        call: str,
        kind: Kind,
        value: Any,
        src: int,
        at_most: int | None = None,
        step: int | None = None,
    ) -> Handle:
        """Post a broadcast of `value`, a tensor to receive into on other ranks than `src`.

        `step` is the caller's own number for it, which all ranks must give alike.
        """
        src = self._checked_rank(src, call)
        size = self._declare(call, at_most)
        if self._connection.closed is not None:
            raise self._connection.closed.again()
        state = self._broadcasts
        number = state.step if step is None else _own_step(call, step)
        if src == self._connection.rank:
            peers = list(self._peers) or [src]  # alone, it is encoded for its checks
            operations = [self._make(call, self._lane(peer, "send")) for peer in peers]
            if value is None and kind is Kind.TENSOR:
                raise ConfigError(operations[0], "rank src has no tensor", "Pass one")
            outgoing = self._encoder.encode(operations[0], kind, value, number, size)
            sends = self._fan_out(operations, outgoing) if self._peers else []
            return AllOf(sends, self._now, lambda: value)
        operation = self._make(call, self._lane(src, "recv"))
        target = value if kind is Kind.TENSOR else None
        if target is not None:
            self._memory.check_target(target, operation)
        operation.step = state.step
        claim, step = self._claim(operation, kind, target, size, number), state.step
        try:
            return self.receive_claim(claim)
        finally:
            if operation.driven is not None:
                state.step = step + 1

    def _lane(self, peer: int, direction: str) -> LaneKey:
        return LaneKey(self._broadcast_channel, peer, direction, BROADCAST)

    def _declare(self, call: str, at_most: int | None) -> int:
        """`at_most`, which is fixed by the first call on the channel; -1 for ``None``."""
        if at_most is None:
            return -1
        size = integer(at_most)
        if size is None or size <= 0:
            raise ConfigError(
                call,
                f"at_most is a positive number of bytes, not {at_most!r}",
                "Pass the largest size that is ever sent, or None",
            )
        declared = self._broadcasts
        if declared.at_most not in (-1, size):
            raise ConfigError(
                call,
                f"at_most = {size} differs from the {declared.at_most} that channel "
                f"{self._broadcast_channel!r} began with",
                "Pass the same in all calls on a channel, or use another channel",
            )
        declared.at_most = size
        return size

    def _fan_out(self, operations: Sequence[Operation], outgoing: Outgoing) -> list[Handle]:
        """Post one message to every peer; a peer that is lost fails its own handle only."""
        step = self._broadcasts.step
        try:
            for operation in operations:
                operation.step = step
                self._admit(operation, outgoing)
                self._peers[operation.lane.peer].prepare_send(operation.lane.name)
            self._broadcasts.step = step + 1
        except BaseException:
            # Nothing was posted: the broadcast did not happen, and may be tried again.
            self._broadcasts.step = step
            for operation in operations:
                self._ledger.remove(operation)
            raise
        try:
            for operation in operations:
                self._post_part(operation, outgoing)
        except BaseException:
            # A signal handler raised.  Ranks must not disagree on whether there was a broadcast.
            for operation in operations:
                if operation.driven is None and not operation.settled:
                    self._post_part(operation, outgoing)
            raise
        return [self._handle(operation) for operation in operations]

    def _post_part(self, operation: Operation, outgoing: Outgoing) -> None:
        """Post a broadcast to one peer; where that fails, its handle does."""
        try:
            peer = self._peers[operation.lane.peer]
            peer.open_send_lane(operation.lane.name).post(operation, outgoing)
        except CommError as error:
            self._ledger.fail(operation, error)


def checked_tag(tag: int | str) -> str:
    """The lane tag of a caller's `tag`; raises `ConfigError` for what is none."""
    number = integer(tag)
    if number is None or not 0 <= number <= MAX_TAG:
        raise ConfigError(
            "tag", f"{tag!r} is not an integer from 0 to {MAX_TAG}", "Use a smaller tag"
        )
    return str(number)


def _own_step(call: str, step: int) -> int:
    """A step that the caller counts, as it travels: below the -1 of what is no broadcast."""
    number = integer(step)
    if number is None or not 0 <= number < 1 << 62:
        raise ConfigError(
            call, f"step is a number from 0 on, not {step!r}", "Pass the engine's step, or None"
        )
    return -2 - number
