"""What the caller holds while an operation is in flight.

There is one `Handle`.  What differs between transports is what it means to wait: that is a
`Waiting`, which all handles of a connection share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic

from commlayer.errors import CommError
from commlayer.progress.completion import Waiting
from commlayer.progress.deadline import Deadline, checked_timeout
from commlayer.progress.operation import Operation
from commlayer.wire.modes import uncompiled

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    T_co = TypeVar("T_co", default=Any, covariant=True)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


@uncompiled
class Handle(Generic[T_co]):
    """The promise of one operation; see each method.

    All methods may be called from any thread, repeatedly, in any order, before
    and after completion, after an error and after the communicator was closed.
    Dropping a handle changes nothing: the operation stays retained and goes on.
    """

    __slots__ = ("_completion", "_operation")

    def __init__(self, operation: Operation, completion: Waiting) -> None:
        self._operation = operation
        self._completion = completion

    def wait(self, timeout: float | None = None) -> None:
        """Return once the result may be used and the source may be overwritten.

        On a device that is true for the calling thread's current stream, which is ordered
        behind the operation; the host waits for host tensors in the message, and for the
        header of a receive.

        `timeout` is in seconds; ``None`` waits without limit and 0 polls.
        Raises the operation's `CommError` (the same one every time),
        `CommTimeout` when the limit expires, which changes nothing, and
        `ValueError` for a negative or NaN limit.
        """
        self._completion.wait(self._operation, checked_timeout(timeout))

    def synchronize(self, timeout: float | None = None) -> None:
        """As `wait`, for the host: returns only when the operation is complete."""
        self._completion.synchronize(self._operation, checked_timeout(timeout))

    def is_completed(self) -> bool:
        """Whether the operation is over, well or not.  Never true early; needs nobody to wait.

        For a send it means that the source may be overwritten (local
        completion), for a receive that the result is usable.
        """
        if not self._operation.settled:
            self._completion.look(self._operation)
        return self._operation.settled

    def exception(self) -> CommError | None:
        """The operation's error, or ``None`` while it is pending or when it went well."""
        return self._operation.error

    def result(self, timeout: float | None = None) -> T_co:
        """Wait, then return what a receive yields (``None`` for a send)."""
        self.wait(timeout)
        return self._operation.value  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        if not self._operation.settled:
            state = "pending"
        else:
            state = "complete" if self._operation.error is None else "failed"
        return f"<{state}: {self._operation.describe()}>"


@uncompiled
class AllOf(Handle[T_co]):
    """One handle for several: complete when all are, failed as soon as it is waited and one is.

    `result` computes what `result()` returns once all are complete.
    """

    __slots__ = ("_handles", "_now", "_result")

    def __init__(
        self,
        handles: Sequence[Handle[Any]],
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

    def _within(self, timeout: float | None) -> Iterator[tuple[Handle[Any], float | None]]:
        """Every handle, with what is left of the time when its turn comes."""
        deadline = Deadline(self._now, checked_timeout(timeout))
        for handle in self._handles:
            yield handle, deadline.remaining()

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)

    def exception(self) -> CommError | None:
        return next((e for h in self._handles if (e := h.exception()) is not None), None)

    def result(self, timeout: float | None = None) -> T_co:
        self.wait(timeout)
        return self._result()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<all of {list(self._handles)!r}>"
