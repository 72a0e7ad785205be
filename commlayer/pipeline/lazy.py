"""A received tensor dict that waits at first access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commlayer.handle import Handle


class LazyTensorDict(Mapping[str, Any]):
    """What `handle`, of a tensor dict, yields; any access waits until it is here.

    Reading keys, values or the length waits, on the calling thread's terms (see
    `Handle.wait`): every access does, so that each stream that reads is ordered
    after the receive.  Raises the receive's error, the same at each access, or
    `CommTimeout` after `timeout` seconds, after which it may be read again.
    Making one, printing it and asking `is_completed` do not wait.
    """

    __slots__ = ("_handle", "_timeout")

    def __init__(self, handle: Handle, timeout: float | None = None) -> None:
        self._handle = handle
        self._timeout = timeout

    def is_completed(self) -> bool:
        """Whether an access would not wait."""
        return self._handle.is_completed()

    def _received(self) -> Mapping[str, Any]:
        received: Mapping[str, Any] = self._handle.result(self._timeout)
        return received

    def __getitem__(self, key: str) -> Any:
        return self._received()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._received())

    def __len__(self) -> int:
        return len(self._received())

    def __repr__(self) -> str:
        return f"LazyTensorDict({self._handle!r})"
