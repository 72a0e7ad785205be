"""What it means to wait for an operation that may have a part on a device."""

from __future__ import annotations

from collections.abc import Callable

from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.completion import HostCompletion
from commlayer.progress.operation import Operation


class StreamCompletion:
    """Waiting orders the current stream where the operation is on the device, and only there.

    `wait` blocks the host until the device part is posted (for a receive: until
    its header is here), then orders the calling thread's current stream after
    it, each waiting stream for itself.  It blocks the host until completion
    where host tensors are part of the operation.  `synchronize` always does.
    Whatever waits for a call of the user is posted inside each of these.
    """

    def __init__(self, host: HostCompletion, side: DeviceSide) -> None:
        self._host = host
        self._side = side

    def wait(self, operation: Operation, timeout: float | None) -> None:
        side, part = self._side, operation.device
        assert part is not None
        if not operation.settled and side.capture_refused():
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation,
                "a graph cannot wait for an operation that was posted outside it",
                "Wait before the capture begins",
            )
        ready = side.wait_for(lambda: operation.settled or part.work is not None, timeout)
        if not ready:
            self._host.expire(operation, timeout)
        # Read once: a release on another thread takes it away, and then it is settled.
        work = part.work
        if operation.settled or work is None:
            self._host.wait(operation, 0.0)
        else:
            work.order()
            # The caller has the result now, before it is complete: he may drop the handle.
            operation.holder = None
        if part.received:
            stream = side.device.current_stream()
            for tensor in part.received:
                side.device.record_stream(tensor, stream)

    def synchronize(self, operation: Operation, timeout: float | None) -> None:
        if not self._side.wait_for(lambda: operation.settled, timeout, asks=True):
            self._host.expire(operation, timeout)
        self._host.wait(operation, 0.0)

    needs_calls = True  # what a driver finds for the device is posted in calls of the user

    def when_settled(self, operation: Operation, callback: Callable[[], object]) -> None:
        self._host.when_settled(operation, callback)

    def look(self, operation: Operation) -> None:
        self._side.advance()
        self._side.progress.advance()
        self._host.look(operation)
