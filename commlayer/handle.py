"""What the caller holds while an operation is in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.progress.engine import ProgressEngine
from commlayer.progress.ledger import Ledger
from commlayer.progress.operation import Operation
from commlayer.progress.runtime import Runtime
from commlayer.wire.modes import uncompiled


class Handle(Protocol):
    """The promise of one operation; see each method.

    All methods may be called from any thread, repeatedly, in any order, before
    and after completion, after an error and after the communicator was closed.
    Dropping a handle changes nothing: the operation stays retained and goes on.
    """

    def wait(self, timeout: float | None = None) -> None:
        """Return once the result may be used and the source may be overwritten.

        `timeout` is in seconds; ``None`` waits without limit and 0 polls.
        Raises the operation's `CommError` (the same one every time),
        `CommTimeout` when the limit expires, which changes nothing, and
        `ValueError` for a negative or NaN limit.
        """
        ...

    def synchronize(self, timeout: float | None = None) -> None:
        """As `wait`, for the host: returns only when the operation is complete."""
        ...

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not.  Never true early; needs nobody to wait.

        For a send it means that the source may be overwritten (local
        completion), for a receive that the result is usable.
        """
        ...

    def exception(self) -> CommError | None:
        """The operation's error, or ``None`` while it is pending or when it went well."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """Wait, then return what a receive yields (``None`` for a send)."""
        ...


@uncompiled
class OperationHandle:
    """The handle of a single operation on a transport that the host waits for."""

    __slots__ = ("_ledger", "_operation", "_progress", "_runtime")

    def __init__(
        self, operation: Operation, ledger: Ledger, progress: ProgressEngine, runtime: Runtime
    ) -> None:
        self._operation = operation
        self._ledger = ledger
        self._progress = progress
        self._runtime = runtime

    def wait(self, timeout: float | None = None) -> None:
        operation = self._operation
        limit = checked_timeout(timeout)
        if not self._ledger.wait(operation, limit):
            self.raise_timeout(limit)
        if operation.error is not None:
            raise operation.error.again()

    synchronize = wait

    def raise_timeout(self, limit: float | None) -> NoReturn:
        """Raise `CommTimeout` for a wait that was limited to `limit` seconds."""
        operation = self._operation
        age = self._runtime.now() - operation.posted_at
        raise CommTimeout(
            operation.describe(),
            f"not complete {age:.3g} s after it was posted; the limit of {limit:g} s expired",
            f"The operation goes on: wait again, or see what rank {operation.lane.peer} does",
        )

    def is_completed(self) -> bool:
        if not self._operation.settled:
            self._progress.notice(self._operation)
        return self._operation.settled

    def exception(self) -> CommError | None:
        return self._operation.error

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._operation.value

    def __repr__(self) -> str:
        if not self._operation.settled:
            state = "pending"
        else:
            state = "complete" if self._operation.error is None else "failed"
        return f"<{state}: {self._operation.describe()}>"


@uncompiled
class StreamHandle:
    """The handle of an operation that may have a part on a device.

    `wait` blocks the host until the device part is posted (for a receive: until
    its header is here), then orders the calling thread's current stream after
    it, each waiting stream for itself.  It blocks the host until completion
    where host tensors are part of the operation.  `synchronize` always does.
    Whatever waits for a call of the user is posted inside each of these.
    """

    __slots__ = ("_device", "_host", "_operation")

    def __init__(self, operation: Operation, host: OperationHandle, device: DeviceSide) -> None:
        self._operation = operation
        self._host = host
        self._device = device

    def wait(self, timeout: float | None = None) -> None:
        operation, device = self._operation, self._device.device
        part = operation.device
        assert part is not None
        if not operation.settled and self._device.capture_refused():
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                "a graph cannot wait for an operation that was posted outside it",
                "Wait before the capture begins",
            )
        self._block_until(lambda: operation.settled or part.work is not None, timeout)
        work = part.work
        stream = device.current_stream()
        if operation.settled or work is None:
            self._host.wait(0)
        else:
            work.event.wait(stream)
        for tensor in part.received:
            device.record_stream(tensor, stream)

    def synchronize(self, timeout: float | None = None) -> None:
        operation = self._operation
        self._block_until(lambda: operation.settled, timeout)
        self._host.wait(0)

    def _block_until(self, ready: Callable[[], bool], timeout: float | None) -> None:
        limit = checked_timeout(timeout)
        if not self._device.wait_for(ready, limit):
            self._host.raise_timeout(limit)

    def is_completed(self) -> bool:
        self._device.advance()
        return self._host.is_completed()

    def exception(self) -> CommError | None:
        return self._operation.error

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._operation.value

    def __repr__(self) -> str:
        return repr(self._host)


@uncompiled
class CompositeHandle:
    """One handle for several: complete when all are, failed as soon as it is waited and one is.

    `result` computes what `result()` returns once all are complete.
    """

    __slots__ = ("_handles", "_now", "_result")

    def __init__(
        self,
        handles: Sequence[Handle],
        now: Callable[[], float],
        result: Callable[[], Any] = lambda: None,
    ) -> None:
        self._handles = tuple(handles)
        self._now = now
        self._result = result

    def wait(self, timeout: float | None = None) -> None:
        for handle, remaining in self._within(timeout):
            handle.wait(remaining)

    def synchronize(self, timeout: float | None = None) -> None:
        for handle, remaining in self._within(timeout):
            handle.synchronize(remaining)

    def _within(self, timeout: float | None) -> Iterator[tuple[Handle, float | None]]:
        """Every handle, with what is left of the time when its turn comes."""
        deadline = Deadline(self._now, checked_timeout(timeout))
        for handle in self._handles:
            yield handle, deadline.remaining()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)

    def exception(self) -> CommError | None:
        return next((e for h in self._handles if (e := h.exception()) is not None), None)

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return self._result()

    def __repr__(self) -> str:
        return f"<all of {list(self._handles)!r}>"
