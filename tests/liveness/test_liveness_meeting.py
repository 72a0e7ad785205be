"""How ranks find each other for liveness, and what strangers get."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from commlayer.backend import World
from commlayer.config import CommConfig
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.liveness import meeting, sockets
from commlayer.liveness.meeting import Contact, Meeting, PeerLink
from commlayer.liveness.sockets import ListenPlace, place

LIMIT = 20.0


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def join(store: Any) -> Iterator[Callable[..., Meeting]]:
    """Makes the part of one rank in a meeting; its connections are closed at the end."""
    made: list[Meeting] = []

    def join(rank: int, size: int, *, timeout: float = 5.0, limit: float = LIMIT) -> Meeting:
        world = World(rank, size, store, limit)
        made.append(Meeting(world, timeout, "127.0.0.1"))
        return made[-1]

    yield join
    for each in made:
        each.__exit__(None, None, None)
        for link in each._links.values():
            link.socket.close()


def contacts(*meetings: Meeting) -> dict[int, Contact | None]:
    """What all ranks have said of themselves."""
    return {rank: each.contact for rank, each in enumerate(meetings)}


def contact(meeting: Meeting) -> Contact:
    assert meeting.contact is not None
    return meeting.contact


def meet(*meetings: Meeting) -> list[dict[int, PeerLink]]:
    said = contacts(*meetings)
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(lambda each: each.meet(said), meetings))


def paired(links: list[dict[int, PeerLink]]) -> bool:
    """Whether both ends of every connection belong together."""
    return all(
        link.socket.getpeername() == links[peer][rank].socket.getsockname()
        for rank, mine in enumerate(links)
        for peer, link in mine.items()
    )


def test_every_pair_is_connected_and_nobody_listens_on(join: Any) -> None:
    meetings = [join(rank, 4) for rank in range(4)]
    links = meet(*meetings)
    assert [sorted(mine) for mine in links] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert paired(links)
    for each in meetings:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", contact(each).port))


def test_the_kernel_keeps_the_connections(join: Any) -> None:
    for mine in meet(join(0, 2), join(1, 2)):
        for link in mine.values():
            assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
            assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
            assert not link.socket.get_inheritable()
            assert sockets.silence(link.socket) < LIMIT


def test_ranks_that_do_without_are_not_waited_for(join: Any) -> None:
    links = meet(join(0, 3), join(1, 3, timeout=0.0), join(2, 3))
    assert [sorted(mine) for mine in links] == [[2], [], [0]]


def test_a_world_of_one_opens_nothing(store: Any) -> None:
    alone = Meeting(World(0, 1, store, LIMIT), 5.0, "")
    assert alone.contact is None
    assert alone.meet({0: None}) == {}


def answer(connection: socket.socket) -> bytes:
    """What the other end says before it closes."""
    try:
        return connection.recv(64)
    except ConnectionResetError:
        return b""


STRANGERS = {
    "silent": lambda secret: b"",
    "short": lambda secret: b"commlive",
    "other protocol": lambda secret: b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n",
    "wrong secret": lambda secret: meeting._GREETING.pack(b"commlive", 1, bytes(32)),
    "wrong magic": lambda secret: meeting._GREETING.pack(b"commlivf", 1, secret),
    "unknown rank": lambda secret: meeting._GREETING.pack(b"commlive", 7, secret),
    "own rank": lambda secret: meeting._GREETING.pack(b"commlive", 0, secret),
    "much": lambda secret: bytes(1 << 16),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stays"])
def test_a_stranger_is_turned_away(join: Any, stranger: str, leaves: bool) -> None:
    meetings = [join(rank, 3) for rank in range(3)]
    found = contact(meetings[0])
    with socket.create_connection((found.address, found.port)) as connection:
        connection.sendall(STRANGERS[stranger](found.secret))
        if leaves:
            connection.close()
        links = meet(*meetings)
        assert [sorted(mine) for mine in links] == [[1, 2], [0, 2], [0, 1]]
        assert paired(links)
        if not leaves:
            connection.settimeout(LIMIT)
            assert not answer(connection)


def test_strangers_without_end_do_not_keep_a_rank_out(
    join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "_MOST_STRANGERS", 4)
    monkeypatch.setattr(meeting, "_STRANGER_SECONDS", 0.1)
    first, second = join(0, 2), join(1, 2)
    found = contact(first)
    strangers = [socket.create_connection((found.address, found.port)) for _ in range(20)]
    links = meet(first, second)
    assert [sorted(mine) for mine in links] == [[1], [0]]
    for each in strangers:
        each.close()


def test_a_second_connection_of_a_rank_is_a_stranger(join: Any) -> None:
    first, second, third = (join(rank, 3) for rank in range(3))
    found, said = contact(first), contacts(first, second, third)
    with ThreadPoolExecutor(2) as pool:
        ending = [pool.submit(each.meet, said) for each in (first, second)]
        while 1 not in first._links:
            pass
        with socket.create_connection((found.address, found.port)) as connection:
            connection.sendall(meeting._GREETING.pack(b"commlive", 1, found.secret))
            connection.settimeout(LIMIT)
            assert connection.recv(1) == b""
        links = third.meet(said)
        assert paired([*(each.result() for each in ending), links])


def test_another_program_at_the_address_is_not_taken_for_the_rank(join: Any) -> None:
    second = join(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        published = Contact("127.0.0.1", port, bytes(32), "pid 1 on elsewhere")

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(64)
                connection.sendall(bytes(32))

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(
            CommError, match=rf"rank 0 \(pid 1 on elsewhere\).*port {port}"
        ) as caught:
            second.meet({0: published, 1: second.contact})
        answering.join()
    assert caught.value.kind is ErrorKind.PEER_LOST


def test_a_rank_that_cannot_be_connected_to_is_named(join: Any) -> None:
    second = join(1, 2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    published = Contact("127.0.0.1", port, bytes(32), "pid 1 on elsewhere")
    with pytest.raises(CommError, match=f"rank 0 .*127.0.0.1 port {port}.*refused") as caught:
        second.meet({0: published, 1: second.contact})
    assert caught.value.kind is ErrorKind.PEER_LOST
    assert "bind_address" in caught.value.cure


def test_a_rank_that_does_not_come_is_named(join: Any) -> None:
    first, second = join(0, 2, limit=0.3), join(1, 2)
    with pytest.raises(CommTimeout, match=r"no liveness connection with rank 1 \(pid \d+ on"):
        first.meet(contacts(first, second))


def test_an_address_of_another_host_is_refused(store: Any) -> None:
    with pytest.raises(CommError, match=r"cannot listen at '203\.0\.113\.1'") as caught:
        Meeting(World(0, 2, store, LIMIT), 5.0, "203.0.113.1")
    assert caught.value.kind is ErrorKind.CONFIG


def test_an_exception_closes_what_was_connected(join: Any) -> None:
    first, second = join(0, 2), join(1, 2)
    links, _ = meet(first, second)
    with pytest.raises(ZeroDivisionError), first:
        raise ZeroDivisionError
    assert links[1].socket.fileno() == -1


@pytest.mark.parametrize("seconds", [0.5, 1.99, -1.0, math.inf])
def test_a_limit_that_the_kernel_cannot_keep_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="peer_timeout"):
        CommConfig(peer_timeout=seconds)
    with pytest.raises(CommError, match="peer_timeout"):
        CommConfig.load({"peer_timeout": seconds}, environ={})


def test_ipv6(store: Any, has_ipv6: None) -> None:
    with (
        Meeting(World(0, 2, store, LIMIT), 5.0, "::1") as first,
        Meeting(World(1, 2, store, LIMIT), 5.0, "::1") as second,
    ):
        links = meet(first, second)
    assert links[0][1].socket.family is socket.AF_INET6
    assert paired(links)
    for mine in links:
        for link in mine.values():
            link.socket.close()


@pytest.mark.parametrize("dualstack", [True, False])
def test_a_wildcard_is_reached_by_ipv4(
    store: Any, dualstack: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if dualstack:
        request.getfixturevalue("has_ipv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: dualstack)
    monkeypatch.setattr(sockets, "_place_by_store", lambda host: ListenPlace("", "127.0.0.1"))
    with (
        Meeting(World(0, 2, store, LIMIT), 5.0, "0.0.0.0") as first,
        Meeting(World(1, 2, store, LIMIT), 5.0, "") as second,
    ):
        links = meet(first, second)
    assert links[0][1].socket.family is (socket.AF_INET6 if dualstack else socket.AF_INET)
    for mine in links:
        for link in mine.values():
            link.socket.close()


class StoreAt:
    """A store on a host, below two prefixes."""

    def __init__(self, host: str, depth: int = 2) -> None:
        if depth:
            self.underlying_store = StoreAt(host, depth - 1)
        else:
            self.host = host


def test_the_address_is_the_one_on_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "first": "10.1.0.1",
        "second": "10.2.0.1",
        "debian": "127.0.1.1",
        "nowhere": None,
        sockets._ELSEWHERE: "10.1.0.7",
        "127.0.0.1": "127.0.0.1",
        "localhost": "127.0.0.1",
    }
    ways = {"first": "10.1.0.1", "second": "10.1.0.1", "debian": "127.0.0.1", "nowhere": ""}

    def resolve(host: str) -> list[tuple[socket.AddressFamily, Any]]:
        found = names[host]
        return [(socket.AF_INET, (found, 9))] if found else []

    monkeypatch.setattr(sockets, "_resolve", resolve)
    monkeypatch.setattr(sockets, "_way_to", lambda host: ways.get(host, names[host]))
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")

    assert place("", StoreAt("second")) == ListenPlace("10.1.0.1", "10.1.0.1")  # it is elsewhere
    assert place("", StoreAt("first")) == ListenPlace("10.1.0.1", "first")  # it is here
    assert place("", StoreAt("debian")) == ListenPlace("", "debian")  # a loopback
    assert place("", StoreAt("localhost")) == ListenPlace("127.0.0.1", "localhost")
    assert place("", StoreAt("127.0.0.1")) == ListenPlace("127.0.0.1", "127.0.0.1")
    assert place("", StoreAt("nowhere")) == ListenPlace("", "debian")
    assert place("", HashStore()) == ListenPlace("10.1.0.7", "10.1.0.7")  # it says nothing
    assert place("10.9.0.1", StoreAt("second")) == ListenPlace("10.9.0.1", "10.9.0.1")
    assert place("0.0.0.0", StoreAt("second")) == ListenPlace("", "10.1.0.1")
    assert place("::", StoreAt("second")) == ListenPlace("", "10.1.0.1")
