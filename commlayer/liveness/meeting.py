"""How every pair of ranks gets its connection.

Each rank listens, and tells all others its address and a random secret when they meet.
Of two ranks the higher connects to the lower, says its number and the lower's secret,
and gets its own secret back.  Whoever does not know the secret is turned away.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple

import msgspec

from commlayer.backend import World
from commlayer.descriptors import out_of_descriptors
from commlayer.errors import (
    CommError,
    CommTimeout,
    ErrorKind,
    connection_with,
)
from commlayer.liveness import sockets

_MAGIC = b"commlive"
_SECRET_BYTES = 32
_GREETING = struct.Struct(f"!8sI{_SECRET_BYTES}s")
_MOST_STRANGERS = 64
"""Connections that have not said who they are; beyond these, more wait in the backlog."""
_STRANGER_SECONDS = 5.0
_CURE = (
    "See that the hosts reach each other on any port, set bind_address on each host to the "
    "address that the others reach, or peer_timeout = 0 on all ranks to do without"
)


class Contact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank listens, and what is to be said there.  `process` says who it is."""

    address: str
    port: int
    secret: bytes
    process: str


class PeerLink(NamedTuple):
    """The connection with one peer; `process` is its pid and host, in words."""

    socket: socket.socket
    process: str


class Meeting:
    """One rank's part: it listens once made, and connects in `meet`.

    `contact` is for the others; ``None`` where this rank does without.  A ``with`` statement
    that ends by an exception closes every connection.
    """

    def __init__(self, world: World, peer_timeout: float, bind_address: str) -> None:
        self._world = world
        self._peer_timeout = peer_timeout
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener: socket.socket | None = None
        self._links: dict[int, PeerLink] = {}
        self._contacts: dict[int, Contact] = {}
        self._hearings: dict[int, _Hearing] = {}
        self._absent: set[int] = set()
        """Ranks with which there is no connection yet."""
        self.contact: Contact | None = None
        if world.size > 1 and peer_timeout:
            self.contact = self._listen(bind_address)

    def _listen(self, bind_address: str) -> Contact:
        place = sockets.place(bind_address, self._world.store)
        try:
            self._listener = sockets.listen(place)
        except OSError as error:
            raise out_of_descriptors("connect", error) or CommError(
                ErrorKind.CONFIG,
                "connect",
                f"cannot listen at {place.bind!r} ({error})",
                "Set bind_address to an address of this host that the other ranks reach",
            ) from error
        port: int = self._listener.getsockname()[1]
        process = f"pid {os.getpid()} on {socket.gethostname()}"
        return Contact(place.address, port, self._secret, process)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop_listening()
        if error is not None:
            for link in self._links.values():
                link.socket.close()

    def meet(self, contacts: Mapping[int, Contact | None]) -> dict[int, PeerLink]:
        """Connect with every rank that takes part, and return the connections by rank.

        `contacts` are those of all ranks.  Raises `CommError`: PEER_LOST for a
        rank that cannot be connected to, `CommTimeout` naming ranks that did not come
        within the world's connect timeout.
        """
        if self._listener is None:
            return {}
        deadline = time.monotonic() + self._world.remaining()
        self._contacts = {
            rank: contact
            for rank, contact in contacts.items()
            if contact is not None and rank != self._world.rank
        }
        self._absent = set(self._contacts)
        for rank in sorted(self._contacts):
            if rank < self._world.rank:
                self._approach(rank, deadline)
        while self._absent:
            self._hear(deadline)
        self._stop_listening()
        for link in self._links.values():
            sockets.keep_alive(link.socket, self._peer_timeout)
        return self._links

    def _approach(self, rank: int, deadline: float) -> None:
        """Connect to a lower rank, and expect its answer."""
        contact = self._contacts[rank]
        remaining = max(0.001, deadline - time.monotonic())
        try:
            connection = sockets.ours(
                socket.create_connection((contact.address, contact.port), remaining)
            )
            connection.sendall(_GREETING.pack(_MAGIC, self._world.rank, contact.secret))
        except OSError as error:
            raise out_of_descriptors("connect", error) or self._unreachable(
                rank, str(error)
            ) from error

        def complete(answer: bytes) -> None:
            if not hmac.compare_digest(answer, self._secret):
                raise self._unreachable(rank, "another program answers there")
            self._links[rank] = PeerLink(connection, contact.process)
            self._absent.discard(rank)

        def fail() -> None:
            raise self._unreachable(rank, "it closed the connection")

        self._add(_Hearing(connection, _SECRET_BYTES, deadline, complete, fail))

    def _unreachable(self, rank: int, cause: str) -> CommError:
        contact = self._contacts[rank]
        return CommError(
            ErrorKind.PEER_LOST,
            connection_with(rank, contact.process),
            f"rank {self._world.rank} cannot reach {contact.address} port {contact.port}: {cause}",
            _CURE,
        )

    def _hear(self, deadline: float) -> None:
        """Wait for anything to arrive, and act on it."""
        now = time.monotonic()
        if now >= deadline:
            raise self._late()
        for hearing in list(self._hearings.values()):
            if now >= hearing.deadline:
                self._remove(hearing)
                hearing.fail()
        listener = self._listener
        assert listener is not None
        poll = select.poll()
        if len(self._hearings) < _MOST_STRANGERS + self._world.size:
            poll.register(listener, select.POLLIN)
        for descriptor in self._hearings:
            poll.register(descriptor, select.POLLIN)
        until = min([deadline, *(hearing.deadline for hearing in self._hearings.values())])
        for descriptor, _ in poll.poll(max(0.0, until - now) * 1000 + 1):
            if descriptor == listener.fileno():
                self._accept(listener)
            else:
                hearing = self._hearings[descriptor]
                if hearing.over():
                    self._remove(hearing)
                    hearing.finish()

    def _late(self) -> CommTimeout:
        who = ", ".join(f"{r} ({self._contacts[r].process})" for r in sorted(self._absent))
        return CommTimeout(
            "connect",
            f"no liveness connection with rank {who} within {self._world.connect_timeout:g} s",
            _CURE,
        )

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = sockets.ours(listener.accept()[0])
        except OSError as error:
            failure = out_of_descriptors("connect", error)
            if failure is None and error.errno in (errno.ENOBUFS, errno.ENOMEM):
                failure = CommError(ErrorKind.CONFIG, "connect", str(error), "Free memory")
            if failure is not None:
                raise failure from error
            return

        def complete(greeting: bytes) -> None:
            rank = self._recognise(greeting)
            if rank is None:
                connection.close()
                return
            try:
                connection.sendall(self._contacts[rank].secret)
            except OSError:
                connection.close()
                return
            self._links[rank] = PeerLink(connection, self._contacts[rank].process)
            self._absent.discard(rank)

        deadline = time.monotonic() + _STRANGER_SECONDS
        self._add(_Hearing(connection, _GREETING.size, deadline, complete, connection.close))

    def _recognise(self, greeting: bytes) -> int | None:
        """The rank that greets, if it knows the secret and is expected."""
        magic, rank, secret = _GREETING.unpack(greeting)
        known = hmac.compare_digest(secret, self._secret) and magic == _MAGIC
        return rank if known and rank > self._world.rank and rank in self._absent else None

    def _add(self, hearing: _Hearing) -> None:
        hearing.connection.setblocking(False)
        self._hearings[hearing.connection.fileno()] = hearing

    def _remove(self, hearing: _Hearing) -> None:
        del self._hearings[hearing.connection.fileno()]

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for hearing in self._hearings.values():
            hearing.connection.close()
        self._hearings.clear()


class _Hearing:
    """A connection whose first bytes are awaited."""

    def __init__(
        self,
        connection: socket.socket,
        size: int,
        deadline: float,
        complete: Callable[[bytes], None],
        fail: Callable[[], None],
    ) -> None:
        self.connection = connection
        self.deadline = deadline
        self.fail = fail
        self._complete = complete
        self._missing = size
        self._heard = b""

    def over(self) -> bool:
        """Take in what has arrived; whether all has, or nothing more will."""
        try:
            heard = self.connection.recv(self._missing)
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._heard += heard
        self._missing -= len(heard)
        return not self._missing or not heard

    def finish(self) -> None:
        """Act on what was heard."""
        if self._missing:
            self.fail()
        else:
            self._complete(self._heard)
