"""Base of backends whose operations complete on device streams.

A plugin states its facts, says whether its device is there, and makes one c10d
process group of two ranks; everything else is here.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from torch import Tensor

from commlayer.backend import Backend, Endpoint, Transport, World
from commlayer.device.device import DeviceRuntime
from commlayer.errors import CommError, ErrorKind

logger = logging.getLogger("commlayer")

_LONG = timedelta(days=24)
"""In milliseconds it fits into 32 bits."""


class PairEndpoint(Endpoint):
    """A process group of two ranks: every operation is with the other one.

    `wait` orders the current stream after the work; it does not block the host,
    and a native timeout is never passed.
    """

    def __init__(self, group: Any, other: int) -> None:
        self._group = group
        self._other = other

    def isend(self, tensor: Tensor, dst: int, tag: int) -> Any:
        return self._group.send([tensor], self._other, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int) -> Any:
        return self._group.recv([tensor], self._other, tag)

    def poll(self, work: Any) -> bool:
        """Whether `work` is over; raises what it failed with.

        A work that failed calls itself complete on some transports and never on others.
        """
        over = bool(work.is_completed())
        error = work.exception()
        if error is not None:
            raise error
        return over

    def abort(self) -> None:
        """Have the transport give up every operation, where it can; the device is free then."""
        _call(self._group, "abort")

    def close(self) -> None:
        """Shut the group down, where that can be said; its destructor would abort it."""
        group, self._group = self._group, None
        _call(group, "shutdown")


def _call(group: Any, method: str) -> None:
    called = getattr(group, method, None)
    if called is None:
        return
    try:
        called()
    except Exception as error:
        logger.warning("commlayer: %s of a device group: %s", method, error)


class StreamTransport(Transport):
    """Opens one communicator per lane, with the lane's peer only."""

    def __init__(self, backend: StreamBackend, world: World) -> None:
        self._backend = backend
        self._world = world
        self.rank = world.rank
        self.device: DeviceRuntime = backend.device()

    def endpoint(self, name: str) -> Endpoint:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            f"communicator {name!r} of all ranks",
            f"backend {self._backend.name!r} communicates by pairs",
            "Use pair()",
        )

    def pair(self, name: str, peer: int) -> PairEndpoint:
        """Make the communicator `name` of this rank and `peer`.

        Ranks pair by name.  Whether this or the first operation on it waits for
        the peer is the transport's affair (``post_may_block``).
        """
        low, high = sorted((self._world.rank, peer))
        mine = 0 if self._world.rank == low else 1
        group = self._backend.group(
            f"commlayer/{self._backend.name}/{name}/{low}-{high}",
            self._world.client(),
            mine,
            _LONG,
        )
        return PairEndpoint(group, 1 - mine)


class StreamBackend(Backend):
    """A backend for one kind of device.

    `host` names the backend that carries headers and host tensors beside it.
    """

    host: ClassVar[str]

    @abstractmethod
    def device(self) -> DeviceRuntime:
        """The device that this process uses."""

    @abstractmethod
    def group(self, name: str, store: Any, rank: int, timeout: timedelta) -> Any:
        """Make the process group `name` of two ranks, with ``send`` and ``recv``.

        `rank` is 0 or 1; the two find each other under `name` on `store`.
        `timeout` is for transports that want a limit for their operations and
        abort when it expires: it is longer than any operation takes.
        """

    def open(self, world: World, options: Mapping[str, Any]) -> StreamTransport:
        if options:
            raise CommError(
                ErrorKind.CONFIG,
                f"options of backend {self.name!r}",
                f"unknown {', '.join(sorted(options))}",
                "It has none",
            )
        return StreamTransport(self, world)
