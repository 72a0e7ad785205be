"""One thread that waits for the connections with all peers to end."""

from __future__ import annotations

import errno
import logging
import select
import socket
from collections.abc import Mapping
from typing import Protocol

from commlayer.errors import CommError, ErrorKind, peer_lost
from commlayer.liveness import sockets
from commlayer.liveness.meeting import PeerLink
from commlayer.progress.runtime import Runtime, Task

logger = logging.getLogger("commlayer")

_GOODBYE = b"\x04"
_MARGIN = 0.1
"""Seconds that a silent peer is given up before the limit, so that all is told within it."""
_GRACE = 0.2
"""Seconds that the transport has, after a death, to hand over what had arrived before."""
_JOIN_SECONDS = 1.0
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)


class Watched(Protocol):
    """Whose peers are watched."""

    def mark_lost(self, rank: int, error: CommError) -> None:
        """Fail every operation with `rank`, pending and to come."""
        ...

    def abandon(self, error: CommError) -> None:
        """Fail every operation with every rank."""
        ...


class Monitor:
    """Watches the connections until `close`; reports each peer that is lost, once.

    A connection that ends without a goodbye is a death.  One whose other end does not
    acknowledge the kernel's probes for `peer_timeout` seconds is a peer that cannot be
    reached.  A busy or stopped process is neither, because its kernel answers.
    """

    def __init__(
        self, links: Mapping[int, PeerLink], peer_timeout: float, runtime: Runtime, watched: Watched
    ) -> None:
        self._links = dict(links)
        self._limit = peer_timeout - _MARGIN
        self._runtime = runtime
        self._watched = watched
        self._dying: dict[int, tuple[float, str]] = {}
        self._closing = False
        self._wake: socket.socket | None = None
        self._task: Task | None = None

    def start(self) -> None:
        """Begin to watch.  Called once; does nothing where there are no connections."""
        if self._links:
            self._wake, woken = map(sockets.ours, socket.socketpair())
            self._task = self._runtime.spawn(lambda: self._run(woken), "commlayer liveness")

    def close(self) -> None:
        """Say goodbye to every peer and stop watching.  A second call does nothing."""
        self._closing = True
        for link in list(self._links.values()):
            try:
                link.socket.send(_GOODBYE)
            except OSError:
                pass
        if self._wake is not None and self._task is not None:
            self._wake.close()
            self._task.join(_JOIN_SECONDS)
        while self._links:
            self._links.popitem()[1].socket.close()

    def _run(self, woken: socket.socket) -> None:
        try:
            with woken:
                self._watch(woken)
        except BaseException as failure:
            if self._closing:
                return
            logger.exception("commlayer: the liveness monitor died")
            error = CommError(
                ErrorKind.PROTOCOL,
                "liveness monitor",
                f"the task that watches the peers died ({type(failure).__name__}: {failure})",
                "This is a defect of commlayer; see the log",
            )
            error.__cause__ = failure
            self._watched.abandon(error)

    def _watch(self, woken: socket.socket) -> None:
        poll = select.poll()
        poll.register(woken, select.POLLIN)
        ranks = {}
        for rank, link in self._links.items():
            ranks[link.socket.fileno()] = rank
            poll.register(link.socket, select.POLLIN)
        while self._links:
            heard = poll.poll(self._time_left() * 1000 + 1)
            if self._closing:
                return
            for descriptor, _ in heard:
                rank = ranks[descriptor]
                cause = _last_words(self._links[rank].socket)
                if cause is None:
                    continue
                poll.unregister(self._links[rank].socket)
                if cause:
                    self._dying[rank] = (self._runtime.now() + _GRACE, cause)
                else:
                    self._links.pop(rank).socket.close()
            for rank, cause in self._lost():
                if rank not in self._dying:
                    poll.unregister(self._links[rank].socket)
                self._report(rank, cause)

    def _time_left(self) -> float:
        """Seconds until a peer may have to be reported."""
        now = self._runtime.now()
        return min(
            max(0.0, self._dying[rank][0] - now)
            if rank in self._dying
            else max(0.0, self._limit - sockets.silence(link.socket))
            for rank, link in self._links.items()
        )

    def _lost(self) -> list[tuple[int, str]]:
        """Peers to be reported now, and why."""
        now = self._runtime.now()
        lost = []
        for rank, link in self._links.items():
            if rank in self._dying:
                due, cause = self._dying[rank]
                if now >= due:
                    lost.append((rank, cause))
            elif (silence := sockets.silence(link.socket)) >= self._limit:
                lost.append((rank, f"unreachable: no acknowledgement for {silence:.1f} s"))
        return lost

    def _report(self, rank: int, cause: str) -> None:
        link = self._links[rank]
        self._watched.mark_lost(rank, peer_lost(rank, link.process, cause))
        del self._links[rank]
        link.socket.close()


def _last_words(connection: socket.socket) -> str | None:
    """Why a connection is over: empty after a goodbye, ``None`` while it is not."""
    try:
        said = connection.recv(len(_GOODBYE))
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in _UNREACHABLE:
            return f"unreachable: {error.strerror}"
        return f"died, or gave this rank up: {error.strerror}"
    if said == _GOODBYE:
        return ""
    return "died, or gave this rank up: its connection closed without a goodbye"
