"""Waiting for a handle in a coroutine, without a thread.

The library calls back when an operation is settled, and that wakes the loop.  Operations that
move only in calls of the user are looked at by the loop itself, all of them by one timer.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from typing import Any, Protocol

_LOOK_SECONDS = 0.001
"""Between two looks of a loop at what moves only in calls."""


class Awaited(Protocol):
    """What `until_done` needs of a handle."""

    def is_completed(self) -> bool: ...

    def add_done_callback(self, callback: Any) -> None: ...


async def until_done(handle: Awaited, needs_calls: bool) -> None:
    """Return once `handle` is over.  Being cancelled changes nothing for it."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        await _until_done_on_trio(handle, needs_calls)
        return
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():  # the coroutine may have been cancelled
            future.set_result(None)

    def ended(_: object) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:  # the loop was closed: nobody waits any more
            pass

    handle.add_done_callback(ended)
    if needs_calls:
        _watcher(loop).watch(handle)
    await future


class _Watcher:
    """Looks at the handles of one loop while there are any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._handles: list[Awaited] = []

    def watch(self, handle: Awaited) -> None:
        """Look at `handle` until it is over.  Called on the loop's thread."""
        self._handles.append(handle)
        if len(self._handles) == 1:
            self._later()

    def _later(self) -> None:
        loop = self._loop()
        if loop is not None:
            loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._handles = [handle for handle in self._handles if not handle.is_completed()]
        if self._handles:
            self._later()


_watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = (
    weakref.WeakKeyDictionary()
)


def _watcher(loop: asyncio.AbstractEventLoop) -> _Watcher:
    if loop not in _watchers:
        _watchers[loop] = _Watcher(loop)
    return _watchers[loop]


async def _until_done_on_trio(handle: Awaited, needs_calls: bool) -> None:
    trio: Any = sys.modules.get("trio")
    if trio is None:
        raise RuntimeError("await a handle inside a running event loop, asyncio's or trio's")
    done = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def ended(_: object) -> None:
        try:
            token.run_sync_soon(done.set)
        except trio.RunFinishedError:  # the loop has ended: nobody waits any more
            pass

    handle.add_done_callback(ended)
    while needs_calls and not handle.is_completed():
        await trio.sleep(_LOOK_SECONDS)
    await done.wait()
