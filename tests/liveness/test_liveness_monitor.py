"""What the monitor reports of connections that end, and what it does not."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from queue import Queue
from typing import Any

import pytest

from commlayer.errors import CommError, ErrorKind
from commlayer.liveness import monitor, sockets
from commlayer.liveness.meeting import PeerLink
from commlayer.liveness.monitor import Monitor
from commlayer.progress.runtime import ThreadRuntime

LIMIT = 20.0


class Watched:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: Queue[tuple[int | None, CommError]] = Queue()

    def mark_lost(self, rank: int, error: CommError) -> None:
        self.told.put((rank, error))

    def abandon(self, error: CommError) -> None:
        self.told.put((None, error))


class Peers:
    """Three connections over loopback: this rank's ends are watched, the others are the test's."""

    def __init__(self) -> None:
        self.watched = Watched()
        self.theirs: dict[int, socket.socket] = {}
        links = {}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for rank in (1, 2, 3):
                self.theirs[rank] = socket.create_connection(listener.getsockname())
                mine, _ = listener.accept()
                mine.setblocking(False)
                links[rank] = PeerLink(mine, f"pid 10{rank} on there")
        self.monitor = Monitor(links, 5.0, ThreadRuntime(), self.watched)
        self.monitor.start()

    def close(self) -> None:
        self.monitor.close()
        for each in self.theirs.values():
            each.close()


@pytest.fixture
def peers() -> Iterator[Peers]:
    peers = Peers()
    yield peers
    peers.close()
    assert peers.watched.told.empty()


def test_a_closed_connection_is_a_death(peers: Peers) -> None:
    peers.theirs[2].close()
    rank, error = peers.watched.told.get(timeout=LIMIT)
    assert rank == 2
    assert error.kind is ErrorKind.PEER_LOST
    assert error.peer == 2
    assert "rank 2 (pid 102 on there)" in str(error)
    assert "closed without a goodbye" in str(error)


def test_a_reset_is_a_death(peers: Peers) -> None:
    peers.theirs[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peers.theirs[1].close()
    rank, error = peers.watched.told.get(timeout=LIMIT)
    assert (rank, error.kind) == (1, ErrorKind.PEER_LOST)
    assert "reset" in str(error)


def test_a_goodbye_is_none(peers: Peers) -> None:
    peers.theirs[1].send(monitor._GOODBYE)
    peers.theirs[1].close()
    peers.theirs[2].close()
    rank, _ = peers.watched.told.get(timeout=LIMIT)
    assert rank == 2


def test_several_deaths(peers: Peers) -> None:
    for each in peers.theirs.values():
        each.close()
    lost = {peers.watched.told.get(timeout=LIMIT)[0] for _ in range(3)}
    assert lost == {1, 2, 3}


def test_silence(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = peers.theirs[3].getsockname()
    monkeypatch.setattr(sockets, "silence", lambda link: 4.9 if link.getpeername() == deaf else 0.5)
    peers.theirs[1].send(monitor._GOODBYE)
    rank, error = peers.watched.told.get(timeout=LIMIT)
    assert (rank, error.kind) == (3, ErrorKind.PEER_LOST)
    assert "unreachable: no acknowledgement for 4.9 s" in str(error)


def test_the_kernel_gives_up(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket.recv

    def recv(link: socket.socket, size: int) -> bytes:
        real(link, size)
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(socket.socket, "recv", recv)
    peers.theirs[1].send(b"?")
    rank, error = peers.watched.told.get(timeout=LIMIT)
    assert rank == 1
    assert "unreachable: Connection timed out" in str(error)


def test_close_says_goodbye_and_tells_nothing(peers: Peers) -> None:
    peers.monitor.close()
    for each in peers.theirs.values():
        each.settimeout(LIMIT)
        assert each.recv(16) == monitor._GOODBYE
        assert each.recv(16) == b""
    peers.monitor.close()


def test_its_death_is_told(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(link: Any) -> float:
        raise MemoryError("none left")

    monkeypatch.setattr(sockets, "silence", broken)
    peers.theirs[1].send(monitor._GOODBYE)
    rank, error = peers.watched.told.get(timeout=LIMIT)
    assert rank is None
    assert "liveness monitor" in str(error)
    assert "MemoryError: none left" in str(error)
