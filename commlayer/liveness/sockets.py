"""Sockets of the liveness connections: addresses, keepalive, and what the kernel knows."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import weakref
from typing import Any, NamedTuple

_PROBE_SECONDS = 1
"""The kernel counts whole seconds between keepalive probes; this is the shortest."""
_MOST_PROBES = 127
_LAST_ACK_RECEIVED = 56
"""Offset of ``tcpi_last_ack_recv`` in ``struct tcp_info`` (``linux/tcp.h``)."""
_MILLISECONDS = struct.Struct("=I")
_BACKLOG = 1024
_ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737); choosing a route to it sends nothing."""

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class ListenPlace(NamedTuple):
    """Where to listen, and the address by which others get there."""

    bind: str
    address: str


def _close_after_fork() -> None:
    """A child that held the connections would keep them open after its parent's death."""
    for each in list(_open):
        each.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_after_fork)


def ours(each: socket.socket) -> socket.socket:
    """Mark a socket as one that a forked child has no part in.

    Like every socket of Python's it is closed on exec.
    """
    _open.add(each)
    return each


def listen(place: ListenPlace) -> socket.socket:
    """Listen at a free port of `place`; raises ``OSError`` if that is not of this host."""
    if place.bind:
        family, *_, address = socket.getaddrinfo(place.bind, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family, backlog=_BACKLOG)
    else:
        listener = _listen_everywhere()
    listener.setblocking(False)
    return ours(listener)


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        except OSError:
            pass  # IPv6 is switched off
    return socket.create_server(("", 0), backlog=_BACKLOG)


def place(bind_address: str, store: Any) -> ListenPlace:
    """Where this rank listens: `bind_address` if set, else where the others reach it.

    That is the address of this host on the way to the store; or on the store's own host
    the name by which all ranks reached the store.  A store without a host says nothing,
    and the host name counts, or the address of the default route if that is loopback.
    """
    if bind_address and not _is_wildcard(bind_address):
        return ListenPlace(bind_address, bind_address)
    bind, address = _place_by_store(_store_host(store))
    return ListenPlace("" if bind_address else bind, address)


def _place_by_store(host: str) -> ListenPlace:
    if not host:
        mine = _way_to(socket.gethostname())
        if not mine or _is_loopback(mine):
            mine = _way_to(_ELSEWHERE) or "127.0.0.1"
        return ListenPlace(mine, mine)
    mine = _way_to(host)
    if not mine:
        return ListenPlace("", socket.gethostname())
    if not _is_here(host, mine):
        return ListenPlace(mine, mine)
    if _is_loopback(mine) and not _is_loopback(host):
        # Here the host's own name means loopback, elsewhere it does not.
        return ListenPlace("", host)
    return ListenPlace(mine, host)


def _store_host(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _resolve(host: str) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [(family, address) for family, _, _, _, address in found]


def _way_to(host: str) -> str:
    """This host's address on the way to `host`; empty if there is no way."""
    for family, address in _resolve(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return ""


def _is_here(host: str, mine: str) -> bool:
    return _is_loopback(mine) or any(address[0] == mine for _, address in _resolve(host))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def keep_alive(connection: socket.socket, peer_timeout: float) -> None:
    """Have the kernel probe the other end once a second, and give it up after `peer_timeout`.

    The kernel at the other end answers, so nothing that its process does or fails to do
    counts.  Options that an operating system lacks are left out.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _PROBE_SECONDS),
        ("TCP_KEEPINTVL", _PROBE_SECONDS),
        ("TCP_KEEPCNT", min(_MOST_PROBES, max(1, int(peer_timeout) - 1))),
        ("TCP_USER_TIMEOUT", int(peer_timeout * 1000)),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def silence(connection: socket.socket) -> float:
    """Seconds since the other end last acknowledged anything; 0 where the kernel does not say."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return 0.0
    size = _LAST_ACK_RECEIVED + _MILLISECONDS.size
    known = connection.getsockopt(socket.IPPROTO_TCP, option, size)
    if len(known) < size:
        return 0.0
    milliseconds: int = _MILLISECONDS.unpack_from(known, _LAST_ACK_RECEIVED)[0]
    return milliseconds / 1000
