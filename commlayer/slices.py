"""Tensor dicts of which each rank of a group sends a slice, gathered where they arrive.

The ranks of a tensor-parallel group hold equal copies of most tensors.  Each
sends one part to its counterpart in the next stage, and the receivers, a group
themselves, give each other theirs.  Which tensor travels how is part of the
message: a `Slice` in place of a tensor.
"""

from __future__ import annotations

import math
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.device.device import DeviceEvent, DeviceRuntime
from commlayer.errors import About, CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle
from commlayer.lanes.claims import MessageClaim
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.wire.frame import Kind, protocol_error
from commlayer.wire.modes import outside_modes, uncompiled
from commlayer.wire.reader import Incoming
from commlayer.wire.tensors import as_bytes, bytes_of, sendable
from commlayer.wire.values import register

if TYPE_CHECKING:
    from commlayer.progress.operation import LaneKey, Operation
    from commlayer.progress.runtime import Runtime

_WHOLE = CommConfig(max_message_bytes=sys.maxsize)
"""For tensors of which only a part is sent."""


@dataclass(frozen=True)
class Slice:
    """Part `index` of `parts` equal parts of the flattened tensor of `shape`."""

    tensor: Tensor
    shape: tuple[int, ...]
    index: int
    parts: int


register(Slice, "commlayer.Slice")


@dataclass(frozen=True)
class Missing:
    """Sent in place of a contribution by a rank that has none."""

    cause: str


register(Missing, "commlayer.Missing")


class Group(Protocol):
    """What is needed of the communicator of the group."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    _exchange: Exchange


# Sending -----------------------------------------------------------------------------------------


def sliced(
    tensors: Mapping[str, Any],
    replicated: Mapping[str, bool] | None,
    group: Group,
    operation: About,
) -> dict[str, Any]:
    """`tensors` with this rank's part in place of each tensor that can be sent in parts.

    Those are the dict's own dense tensors whose number of elements is a multiple
    of the group's size, unless `replicated` says False of them.
    """
    parts = group.world_size
    if not isinstance(replicated, Mapping | None):
        raise CommError(
            ErrorKind.CONFIG,
            operation,
            f"all_gather_tensors is a {type(replicated).__qualname__}",
            "Pass a dict of names, with False for what is not the same on all ranks of the group",
        )
    result = dict(tensors)
    for key, value in tensors.items():
        whole = (
            not isinstance(value, Tensor)
            or not (replicated or {}).get(key, True)
            or parts == 1
            or value.numel() == 0
            or value.numel() % parts
        )
        if not whole:
            flat = sendable(value, operation, _WHOLE).view(-1)
            size = flat.numel() // parts
            part = flat[group.rank * size : (group.rank + 1) * size]
            result[key] = Slice(part, tuple(value.shape), group.rank, parts)
    return result


def check_replicated(
    tensors: Mapping[str, Any],
    message: Mapping[str, Any],
    group: Group,
    key: tuple[Any, ...],
    operation: About,
    timeout: float,
) -> None:
    """Raise (CONFIG), on every rank, if a tensor sent in parts is not the same on all of them.

    `message` is `tensors` after `sliced`.  Every rank of the group calls this in
    the same order; it waits for the others at most `timeout` seconds.
    """
    mine = {
        name: (str(tensors[name].dtype), value.shape, _checksum(tensors[name]))
        for name, value in message.items()
        if isinstance(value, Slice)
    }
    exchange = group._exchange
    exchange.post(key, mine)
    exchange.wait(key, timeout)
    everybody = exchange.peek(key)
    exchange.forget(key)
    for peer, theirs in everybody.items():
        if theirs == mine:
            continue
        if not isinstance(theirs, dict):
            raise protocol_error(operation, f"rank {peer} of all_gather_group sent no checksums")
        differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        raise CommError(
            ErrorKind.CONFIG,
            operation,
            f"{', '.join(map(repr, differing))} would be sent in parts, and is not the same on "
            f"ranks {group.rank} and {peer} of all_gather_group: it is not replicated",
            f"Say so on every rank: all_gather_tensors={{{differing[0]!r}: False}}",
        )


def _checksum(tensor: Tensor) -> int:
    host = sendable(tensor.detach().cpu(), "check_slices", _WHOLE)
    if host.nbytes == 0:
        return 0
    return zlib.crc32(bytes_of(host))


# Between the ranks of a group --------------------------------------------------------------------


class Exchange:
    """One value from each rank of a group to each other one, matched by key in any order.

    Messages of a peer are taken in when somebody waits, and kept for whom they
    are.  `send(value, peer)` and `receive(peer)` post on lanes that nothing
    else uses.
    """

    def __init__(
        self,
        peers: Sequence[int],
        runtime: Runtime,
        send: Callable[[Any, int], object],
        receive: Callable[[int], Handle],
    ) -> None:
        self.runtime = runtime
        self._peers = peers
        self._send = send
        self._receive = receive
        self._lock = runtime.lock()
        self._posted: dict[int, Handle] = {}
        self._arrived: dict[tuple[int, Any], Handle] = {}
        self._unwanted: set[tuple[int, Any]] = set()
        self._counts: defaultdict[tuple[Any, ...], int] = defaultdict(int)
        self._lines: defaultdict[tuple[Any, ...], deque[GatherHandle]] = defaultdict(deque)

    def key(self, kind: tuple[Any, ...]) -> tuple[Any, ...]:
        """The next key of its kind: every rank asks for them in the same order."""
        with self._lock:
            number = self._counts[kind]
            self._counts[kind] += 1
        return (*kind, number)

    def line(self, kind: tuple[Any, ...]) -> deque[GatherHandle]:
        """The handles of one kind and sender that have not posted their parts, oldest first."""
        return self._lines[kind]

    def leave(self, line: deque[GatherHandle], handle: GatherHandle) -> None:
        """Take `handle`, which has posted, from the front of `line` if it is still there."""
        with self._lock:
            if line and line[0] is handle:
                line.popleft()

    def post(self, key: tuple[Any, ...], value: Any) -> None:
        """Send `value` to every other rank."""
        for peer in self._peers:
            self._send((key, value), peer)

    def wait(
        self,
        key: tuple[Any, ...],
        timeout: float | None,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return once every other rank's value is here, or `over`.

        Raises `CommTimeout`, which loses nothing, and whatever receiving raises.
        """
        deadline = Deadline(self.runtime.now, timeout)
        for peer in self._peers:
            while not self._has(peer, key) and not over():
                self._take_in(peer, deadline.remaining())

    def ready(self, key: tuple[Any, ...]) -> bool:
        """Whether `wait` would return at once.  Never blocks."""
        for peer in self._peers:
            while not self._has(peer, key):
                if not self._next(peer).is_completed():
                    return False
                self._take_in(peer, 0)
        return True

    def peek(self, key: tuple[Any, ...]) -> dict[int, Any]:
        """Every other rank's value, once here, ordered before the current stream."""
        return {peer: self._arrived[peer, key].result(0)[1] for peer in self._peers}

    def listen(self) -> None:
        """Have the next message of every other rank taken in, so that its send completes."""
        for peer in self._peers:
            self._next(peer)

    def forget(self, key: tuple[Any, ...]) -> None:
        """Say that nobody asks for `key` any more."""
        with self._lock:
            for peer in self._peers:
                if self._arrived.pop((peer, key), None) is None:
                    self._unwanted.add((peer, key))

    def _has(self, peer: int, key: tuple[Any, ...]) -> bool:
        with self._lock:
            return (peer, key) in self._arrived

    def _next(self, peer: int) -> Handle:
        with self._lock:
            handle = self._posted.get(peer)
            if handle is None:
                handle = self._posted[peer] = self._receive(peer)
            return handle

    def _take_in(self, peer: int, timeout: float | None) -> None:
        handle = self._next(peer)
        message = handle.result(timeout)
        with self._lock:
            if self._posted.get(peer) is not handle:
                return
            del self._posted[peer]
            try:
                key, _ = message
                if (peer, key) in self._unwanted:
                    self._unwanted.remove((peer, key))
                else:
                    self._arrived[peer, key] = handle
            except (TypeError, ValueError) as error:
                raise protocol_error(
                    f"exchange with rank {peer} of all_gather_group", "the message has no key"
                ) from error


# Receiving ---------------------------------------------------------------------------------------


class WholeDictClaim(MessageClaim):
    """Asks for a tensor dict that must not have slices: there is no group to gather them with."""

    __slots__ = ()

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation, Kind.TENSOR_DICT)

    def value(self, incoming: Incoming) -> Any:
        value = super().value(incoming)
        for key, item in value.items():
            if isinstance(item, Slice):
                raise CommError(
                    ErrorKind.PROTOCOL,
                    self.operation.describe(),
                    f"the sender sent {key!r} as part {item.index} of {item.parts}, and this "
                    "receive has no all_gather_group",
                    "Receive with the group whose ranks get the other parts",
                )
        return value


@uncompiled
class GatherHandle(Handle[dict[str, Any]]):
    """The handle of a received tensor dict whose slices are gathered when it is waited.

    The contract is that of `commlayer.Handle`, and in addition: every rank of
    the group waits for (or asks for the completion of) its handle of the same
    message, in any order among messages of one sender, in the same order
    otherwise.  `wait` orders the calling thread's current stream where tensors
    are on a device; `synchronize` blocks the host until they are complete.
    """

    PAUSE = 0.0005
    """Seconds between two looks at the device in `synchronize`."""

    def __init__(
        self,
        received: Handle,
        group: Group,
        kind: tuple[Any, ...],
        lane: LaneKey,
        operation: About,
        device: DeviceRuntime | None,
    ) -> None:
        self._received = received
        self._group = group
        self._exchange = group._exchange
        self._about = operation
        self._device = device
        self._key = self._exchange.key(kind)
        self._lock = self._exchange.runtime.lock()
        self._line = self._exchange.line((*kind, lane))
        self._line.append(self)
        self._slices: dict[str, Slice] = {}
        self._posted = False
        self._value: dict[str, Any] = {}
        self._error: CommError | None = None
        self._gathered: DeviceEvent | None = None
        self._results: list[Tensor] = []
        self._done = False

    @outside_modes
    def wait(self, timeout: float | None = None) -> None:
        deadline = self._deadline(timeout)
        if not self._done:
            self._gather(deadline)
        if self._error is not None:
            raise self._error.again()
        self._received.wait(deadline.remaining())
        if self._gathered is not None and self._device is not None:
            self._gathered.wait()
            stream = self._device.current_stream()
            for tensor in self._results:
                self._device.record_stream(tensor, stream)

    @outside_modes
    def synchronize(self, timeout: float | None = None) -> None:
        deadline = self._deadline(timeout)
        self.wait(deadline.remaining())
        self._received.synchronize(deadline.remaining())
        while not self._is_gathered():
            if deadline.expired():
                raise CommTimeout(
                    self._about,
                    f"its slices are not gathered on the device after {timeout:g} s",
                    "The operation goes on: wait again",
                )
            self._exchange.runtime.sleep(self.PAUSE)

    @outside_modes
    def is_completed(self) -> bool:
        if not self._done:
            try:
                if not self._post_in_line(self._deadline(None), ready_only=True):
                    return False
                if not self._slices or self._error or self._exchange.ready(self._key):
                    self._assemble()
            except CommError as error:
                self._fail(error)
        if not self._done:
            return False
        return self._error is not None or self._is_gathered()

    def _is_gathered(self) -> bool:
        gathered, device = self._gathered, self._device
        return gathered is None or device is None or device.ask(gathered.query)

    def exception(self) -> CommError | None:
        return self._error

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        self.wait(timeout)
        return self._value

    def __repr__(self) -> str:
        state = "pending" if not self._done else "failed" if self._error else "complete"
        return f"<{state}: {self._about}>"

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self._exchange.runtime.now, checked_timeout(timeout))

    def _gather(self, deadline: Deadline) -> None:
        try:
            self._post_in_line(deadline)
            if self._slices and self._error is None:
                self._exchange.wait(self._key, deadline.remaining(), lambda: self._done)
            self._assemble()
        except CommTimeout:
            raise
        except CommError as error:
            self._fail(error)

    def _post_in_line(self, deadline: Deadline, *, ready_only: bool = False) -> bool:
        """Post this handle's parts and, before, those of older messages of the sender.

        Ranks that wait in another order get what they wait for.  With
        `ready_only`, False where that would block.
        """
        while not self._posted:
            try:
                oldest = self._line[0]
            except IndexError:
                continue
            if ready_only and not oldest._received.is_completed():
                return False
            oldest._post(deadline.remaining())
            self._exchange.leave(self._line, oldest)
        return True

    def _post(self, timeout: float | None) -> None:
        """Wait until the message is here, then send its slices to the group, once."""
        try:
            self._received.wait(timeout)
        except CommTimeout:
            raise
        except CommError:
            pass
        with self._lock:
            if self._posted:
                return
            try:
                self._slices = self._own_slices(self._received.result(0))
                if self._slices:
                    self._exchange.post(self._key, self._slices)
            except CommError as error:
                self._error = error
                self._excuse(error)
            finally:
                self._posted = True

    def _own_slices(self, value: dict[str, Any]) -> dict[str, Slice]:
        slices = {key: item for key, item in value.items() if isinstance(item, Slice)}
        for key, item in slices.items():
            self._check(key, item)
            if item.parts != self._group.world_size:
                raise CommError(
                    ErrorKind.CONFIG,
                    self._about,
                    f"the sender sent {key!r} in {item.parts} parts, and all_gather_group has "
                    f"{self._group.world_size} ranks here",
                    "Use groups of one size at both ends, or mark the tensor as not replicated: "
                    f"all_gather_tensors={{{key!r}: False}}",
                )
        return slices

    def _check(self, key: str, item: Any) -> Slice:
        """Return `item`, which a peer sent; raises (PROTOCOL) unless it is a slice that adds up."""
        if not (
            isinstance(item, Slice)
            and isinstance(item.tensor, Tensor)
            and isinstance(item.shape, tuple)
            and all(type(number) is int and number > 0 for number in (*item.shape, item.parts))
            and type(item.index) is int
            and 0 <= item.index < item.parts
            and math.prod(item.shape) == item.tensor.numel() * item.parts
        ):
            raise protocol_error(self._about, f"slice {key!r} contradicts itself")
        return item

    def _excuse(self, error: CommError) -> None:
        """Tell the group that there is no part from here, unless all of it knows."""
        if error.kind is ErrorKind.CONFIG:
            return
        try:
            self._exchange.post(self._key, Missing(str(error)))
            self._exchange.listen()
        except CommError:
            pass

    def _assemble(self) -> None:
        """Put the tensors together on the current stream, once."""
        with self._lock:
            if self._done:
                return
            if self._error is None:
                value = dict(self._received.result(0))
                if self._slices:
                    everybody = self._exchange.peek(self._key)
                    for key, mine in self._slices.items():
                        value[key] = self._whole(key, mine, everybody)
                        self._results.append(value[key])
                    self._record()
                self._value = value
            self._done = True
        self._over()

    def _over(self) -> None:
        if self._slices or (self._error is not None and self._error.kind is not ErrorKind.CONFIG):
            self._exchange.forget(self._key)

    def _whole(self, key: str, mine: Slice, everybody: Mapping[int, Any]) -> Tensor:
        parts = {mine.index: mine}
        for peer, theirs in everybody.items():
            if isinstance(theirs, Missing):
                raise protocol_error(
                    self._about, f"rank {peer} of all_gather_group has no part: {theirs.cause}"
                )
            if isinstance(theirs, dict) and key not in theirs:
                raise self._unequal(key, mine, peer, "no part")
            item = self._check(key, theirs.get(key) if isinstance(theirs, dict) else None)
            like = (item.shape, item.parts, item.tensor.dtype)
            if item.index in parts or like != (mine.shape, mine.parts, mine.tensor.dtype):
                raise self._unequal(key, mine, peer, _kind(item))
            parts[item.index] = item
        return self._joined([parts[index].tensor for index in range(mine.parts)], mine.shape)

    def _unequal(self, key: str, mine: Slice, peer: int, theirs: str) -> CommError:
        return CommError(
            ErrorKind.PROTOCOL,
            self._about,
            f"{key!r} of this rank ({_kind(mine)}) and of rank {peer} of all_gather_group "
            f"({theirs}) are not parts of one tensor: their senders sent different ones",
            "Send the same tensor on every rank of the sending group, or say that it is not "
            f"replicated: all_gather_tensors={{{key!r}: False}}",
        )

    def _joined(self, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        device, dtype = self._device, parts[0].dtype
        with torch.inference_mode(False):
            if device is not None and device.holds(parts[0]):
                whole = device.empty(shape, dtype)
                copy: Callable[[Tensor, Tensor], object] = device.copy
            else:
                whole = torch.empty(shape, dtype=dtype, device=parts[0].device)
                copy = Tensor.copy_
            size = parts[0].nbytes
            for start, part in zip(range(0, whole.nbytes, size), parts, strict=True):
                copy(as_bytes(whole)[start : start + size], as_bytes(part))
        return whole

    def _record(self) -> None:
        device = self._device
        if device is not None and any(device.holds(tensor) for tensor in self._results):
            self._results = [tensor for tensor in self._results if device.holds(tensor)]
            self._gathered = device.event()
            self._gathered.record(device.current_stream())

    def _fail(self, error: CommError) -> None:
        with self._lock:
            if not self._done:
                self._error = error
                self._done = True
        self._over()


def _kind(item: Slice) -> str:
    dtype = str(item.tensor.dtype).removeprefix("torch.")
    return f"part {item.index} of {item.parts}, {dtype} of shape {list(item.shape)}"
