"""What the caller holds while an operation is in flight.

There is one `Handle`.  What differs between transports is what it means to wait: that is a
`Waiting`, which all handles of a connection share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

from commlayer import awaiting
from commlayer.errors import CommError, CommTimeout, ConfigError
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

    __slots__ = ("__weakref__", "_completion", "_operation")

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

    def cancel(self) -> bool:
        """Withdraw a receive: True if no message was matched to it, and none will be.

        Then the handle raises `Cancelled`, and the next receive of the lane gets the message.
        False, and nothing has changed, for a send, a broadcast, and a receive whose message
        is here or on its way: wait for it.
        """
        operation = self._operation
        lane = operation.driven
        if operation.settled or operation.step >= 0 or lane is None:
            return False
        return lane.withdraw(operation)

    def add_done_callback(self, callback: Callable[[Handle[T_co]], object]) -> None:
        """Call ``callback(handle)`` once the operation is over, well or not: now, if it is.

        On any thread, the library's own included: be quick, and call nothing that blocks.
        What it raises is logged.
        """
        self._completion.when_settled(self._operation, lambda: callback(self))
        self.is_completed()  # somebody wants to know, as with a wait

    def __await__(self) -> Generator[Any, None, T_co]:
        """``await handle`` is ``handle.result()`` for a coroutine; no thread waits meanwhile.

        On asyncio, and on trio through anyio or by itself.  A coroutine that is cancelled
        leaves the operation as it is.
        """
        if not self.is_completed():
            yield from awaiting.until_done(self, self._needs_calls).__await__()
        return self.result()

    @property
    def _needs_calls(self) -> bool:
        return self._completion.needs_calls

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

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Handle[T_co]], object]) -> None:
        pending = len(self._handles)
        lock = threading.Lock()  # several may end at once, on threads of their own

        def ended(handle: Handle[Any]) -> None:
            nonlocal pending
            with lock:
                pending -= 1
                last = not pending
            if last:
                callback(self)

        if not self._handles:
            callback(self)
        for handle in self._handles:
            handle.add_done_callback(ended)

    @property
    def _needs_calls(self) -> bool:
        return any(handle._needs_calls for handle in self._handles)

    def exception(self) -> CommError | None:
        return next((e for h in self._handles if (e := h.exception()) is not None), None)

    def result(self, timeout: float | None = None) -> T_co:
        self.wait(timeout)
        return self._result()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"<all of {list(self._handles)!r}>"


@uncompiled
class LookedAt(Handle[T_co]):
    """A handle that moves only when somebody waits for it or looks at it.

    Subclasses define `_look`; whoever looks runs the callbacks.
    """

    def _look(self) -> bool:
        """Move on, without blocking; whether it is over."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        over = self._look()
        while over and self._callbacks:
            self._callbacks.pop(0)(self)
        return over

    def cancel(self) -> bool:
        return False

    def add_done_callback(self, callback: Callable[[Handle[T_co]], object]) -> None:
        self._callbacks.append(callback)
        self.is_completed()

    @property
    def _needs_calls(self) -> bool:
        return True

    @cached_property
    def _callbacks(self) -> list[Callable[[Handle[T_co]], object]]:
        return []


_LOOK_SECONDS = 0.001
"""Between two looks at handles that move only in calls: as often as an idle poller looks."""


def wait_any(handles: Iterable[Handle[T_co]], timeout: float | None = None) -> Handle[T_co]:
    """Return the first of `handles` that is over, well or not; of several, the first given.

    `timeout` is in seconds; ``None`` waits without limit and 0 polls.  Raises `CommTimeout`
    when it expires, which changes nothing, and `ConfigError` without handles.
    """
    handles = list(handles)
    if not handles:
        raise ConfigError("wait_any", "there is no handle to wait for", "Pass one or more")
    deadline = Deadline(time.monotonic, checked_timeout(timeout))
    ended = threading.Event()
    for handle in handles:
        handle.add_done_callback(lambda _: ended.set())
    slices = any(handle._needs_calls for handle in handles)
    while True:
        ended.clear()
        done = next((handle for handle in handles if handle.is_completed()), None)
        if done is not None:
            return done
        remaining = deadline.remaining()
        if remaining is not None and remaining <= 0:
            raise CommTimeout(
                "wait_any",
                f"none of {len(handles)} is complete; the limit of {timeout:g} s expired",
                "They go on: wait again, or see `comm.report()`",
            )
        if slices:
            remaining = _LOOK_SECONDS if remaining is None else min(remaining, _LOOK_SECONDS)
        ended.wait(remaining)


def wait_all(handles: Iterable[Handle[Any]], timeout: float | None = None) -> list[Any]:
    """Wait for all `handles` within one limit, and return their results in order.

    `timeout` as for `wait_any`.  Raises the error of the first that failed.
    """
    deadline = Deadline(time.monotonic, checked_timeout(timeout))
    return [handle.result(deadline.remaining()) for handle in list(handles)]


def within(handle: Handle[T_co], timeout: float | None) -> T_co:
    """The result of `handle`; a receive that is too late is withdrawn."""
    try:
        return handle.result(timeout)
    except CommTimeout as error:
        if not handle.cancel():
            error.handle = handle
        raise
