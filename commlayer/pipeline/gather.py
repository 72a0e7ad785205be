"""The receiving side of slices: a handle that gathers them when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commlayer.device.device import DeviceEvent, DeviceRuntime
from commlayer.errors import About, CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle, LookedAt
from commlayer.pipeline.exchange import Group, Missing
from commlayer.pipeline.slices import Slice, checked_slice, slices_in
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.wire.frame import protocol_error
from commlayer.wire.modes import outside_modes, uncompiled
from commlayer.wire.tensors import as_bytes

if TYPE_CHECKING:
    from commlayer.progress.operation import LaneKey


@uncompiled
class GatherHandle(LookedAt[dict[str, Any]]):
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
        # Several threads may wait: one posts this rank's parts and one puts the tensors together.
        # Parts are posted under it; it comes before the locks of exchange, lanes and ledger.
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
    def _look(self) -> bool:
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

        Older messages go first, so ranks may wait in any order.  With
        `ready_only`, False where that would block.
        """
        while not self._posted:
            try:
                oldest = self._line[0]
            except IndexError:
                continue  # another thread has just taken this one from the line, and posted
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
                value = self._received.result(0)
                self._slices = slices_in(value, self._group.world_size, self._about)
                if self._slices:
                    self._exchange.post(self._key, self._slices)
            except CommError as error:
                self._error = error
                self._excuse(error)
            finally:
                self._posted = True

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
            given = theirs.get(key) if isinstance(theirs, dict) else None
            item = checked_slice(key, given, self._about)
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
