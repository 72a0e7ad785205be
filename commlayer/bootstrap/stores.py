"""Stores: who serves one, how a process gets its own client, and what is in the way."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from commlayer.bootstrap.launch import launcher_holds_store, refusal
from commlayer.bootstrap.patience import Helper, Late, check_staying
from commlayer.descriptors import out_of_descriptors
from commlayer.errors import CommError, CommTimeout

_TRY_SECONDS = 2.0
"""One try of torch's client, which by itself tries again without saying why."""
_ASK_SECONDS = 5.0
"""How long a store is asked whose it is: on a busy machine it answers late.  Half of the limit of
`connect`, where that is less."""
_PAUSE = 0.05
_HOLDER = "commlayer/holder"
"""Key under which the process that serves a store says who it is."""

_servers: dict[Address, Any] = {}
"""Stores that this process serves, until it ends: other ranks may use them for longer."""
_of_parent: set[Address] = set()
"""Addresses that the process this one was forked from serves."""


class Address(NamedTuple):
    """Where a store is served."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def _after_fork() -> None:
    """A child has its parent's servers without their threads: it must neither use nor end them."""
    for server in _servers.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    _of_parent.update(_servers)
    _servers.clear()


os.register_at_fork(after_in_child=_after_fork)


def open_store(address: Address, *, serve: bool, limit: float) -> Any:
    """A client, of this call alone, of the store at `address`; with `serve`, serves it first.

    Answers signals.  Raises `CommError` within `limit` seconds, naming what is at the
    address instead.
    """
    helper, opening = Helper(), _Opening(address, time.monotonic() + limit)
    try:
        if serve and address not in _of_parent:
            helper.call(opening.serve, limit, check_staying)
        client = helper.call(opening.connect, limit, check_staying)
        # It has that of one try, and so would its clones: a transport that makes a communicator
        # asks one of them, on a busy machine for longer.
        client.set_timeout(timedelta(seconds=limit))
        return client
    except Late:
        raise CommTimeout(
            "connect",
            f"the store at {address} cannot be used: {opening.finding} (limit {limit:.3g} s)",
            opening.cure,
        ) from None
    finally:
        helper.close()


class _Opening:
    """The steps to a client.  `finding` and `cure` are about what has been in the way so far."""

    def __init__(self, address: Address, deadline: float) -> None:
        self._address = address
        self._deadline = deadline
        self.finding = f"the name {address.host!r} is not resolved"
        self.cure = "Check MASTER_ADDR, and the resolution of names on this host"

    def serve(self) -> None:
        """Serve the store in this process, unless it does already."""
        if self._address in _servers:
            return
        host, port = self._address
        try:
            # Shared with a store of torch's own that this process serves at the port.
            server: Any = TCPStore(
                host, port, None, True, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            if "EADDRINUSE" in str(error):
                raise refusal(
                    f"rank 0 cannot serve the store at port {port}: {self._holder()} has the port",
                    "Choose a free MASTER_PORT; see that one process only has RANK 0",
                ) from error
            raise out_of_descriptors("connect", error) or refusal(
                f"rank 0 cannot serve the store at {self._address} ({_reason(error)})",
                "Check MASTER_ADDR and MASTER_PORT",
            ) from error
        server.set(_HOLDER, f"pid {os.getpid()} on {socket.gethostname()}".encode())
        _servers[self._address] = server

    def _holder(self) -> str:
        """Who serves at the address, as far as that can be found out in a moment."""
        now = time.monotonic()
        limit = min(_ASK_SECONDS, (self._deadline - now) / 2)
        helper, opening = Helper(), _Opening(self._address, now + limit)

        def ask() -> str:
            client = opening.connect()
            if client.check([_HOLDER]):
                return (
                    "rank 0 of another job, or a second one of this "
                    f"({client.get(_HOLDER).decode()})"
                )
            return "a store of another job"

        try:
            return helper.call(ask, limit)
        except (Late, CommError, RuntimeError):
            return "another program"
        finally:
            helper.close()

    def connect(self) -> Any:
        """Try until there is a client, or the limit is over."""
        while True:
            client = self._try()
            if client is not None:
                return client
            if time.monotonic() + _PAUSE >= self._deadline:
                raise Late
            time.sleep(_PAUSE)

    def _try(self) -> Any:
        left = max(0.1, self._deadline - time.monotonic())
        host, port = self._address
        if self._address in _servers:
            port = _servers[self._address].port  # that of port 0 is known once it is served
        try:
            # Torch's client says on the error stream, at length, what is found out here.
            with socket.create_connection((host, port), left):
                pass
        except OSError as error:
            failure = out_of_descriptors("connect", error)
            if failure is not None:
                raise failure from error
            self._nobody(error)
            return None
        self.finding = "a program there accepts connections and says nothing, or not what is right"
        self.cure = (
            "Another program has the port, or the process that serves the store is stopped: choose "
            "another MASTER_PORT, the same on all ranks"
        )
        try:
            return TCPStore(
                host,
                port,
                None,
                False,
                timedelta(seconds=min(left, _TRY_SECONDS)),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            failure = out_of_descriptors("connect", error)
            if failure is not None:
                raise failure from error
            if "invalid value" in str(error):
                raise refusal(
                    f"the store at {self._address} cannot be used: another program answers there "
                    f"({_reason(error)})",
                    "Choose another MASTER_PORT, the same on all ranks",
                ) from error
            return None

    def _nobody(self, error: OSError) -> None:
        if isinstance(error, socket.gaierror):
            self.finding = f"the name {self._address.host!r} is not resolved ({error})"
            return
        self.finding = f"rank 0 did not connect, nobody serves it there ({error})"
        self.cure = "Start rank 0 within connect_timeout, and check MASTER_ADDR and MASTER_PORT"
        if launcher_holds_store():
            self.finding = f"nobody serves it there ({error})"
            self.cure = (
                "torchrun serves the store itself (TORCHELASTIC_USE_AGENT_STORE = True), and rank "
                "0 does not: leave MASTER_ADDR and MASTER_PORT as torchrun sets them, or set "
                "TORCHELASTIC_USE_AGENT_STORE = False on all ranks to have rank 0 serve another"
            )


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def describe(store: Any) -> str:
    """The words for a store: where it is, if it says so."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    return f"the store at {host}:{port}" if host else "the store of the ranks"


def prefixed(store: Any, prefix: str) -> Any:
    """`store` with every key below `prefix`."""
    return PrefixStore(prefix, store) if isinstance(store, Store) else _Prefixed(prefix, store)


class _Prefixed:
    """As torch's ``PrefixStore``, over a store that is not torch's."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def check(self, keys: list[str]) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}" for key in keys]))
