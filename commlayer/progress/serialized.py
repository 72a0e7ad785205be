"""Calls into a transport that allows one at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.progress.runtime import Runtime


class SerializedEndpoint(Endpoint):
    """Passes every call on under one lock, for ``threads = SERIALIZED``.

    `wait` is called only on works that were polled complete, so the lock is
    never held for long.
    """

    def __init__(self, endpoint: Endpoint, runtime: Runtime) -> None:
        self._endpoint = endpoint
        # The transport's rule, not ours; it is a leaf: nothing else is taken under it.
        self._lock = runtime.lock()

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        with self._lock:
            return self._endpoint.isend(tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        with self._lock:
            return self._endpoint.irecv(tensor, src, tag)

    def wait(self, work: Any) -> None:
        with self._lock:
            self._endpoint.wait(work)

    def poll(self, work: Any) -> bool:
        with self._lock:
            return self._endpoint.poll(work)

    def close(self) -> None:
        with self._lock:
            self._endpoint.close()
