"""oneCCL's own library between two processes, on host memory.

`Group` has the part of a c10d process group of two ranks that a device plugin uses.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

FOLDER = "ONECCL_LIBRARY"
"""The variable with the folder that ``prepare.py`` filled."""

SHIM = "libcommlayer_oneccl_shim.so"


def environment(folder: str) -> dict[str, str]:
    """Variables for processes that use the library; they must be set before these start."""
    return {
        FOLDER: folder,
        "LD_LIBRARY_PATH": f"{folder}/lib",
        # oneCCL asks a launcher of MPI otherwise who is on this machine.
        "CCL_PROCESS_LAUNCHER": "none",
        # Its other transport, MPI, is not among what was fetched.
        "CCL_ATL_TRANSPORT": "ofi",
        "FI_PROVIDER": "tcp",
        # All ranks are here; without these it takes the first interface that has an address.
        "FI_TCP_IFACE": "lo",
        "CCL_KVS_IFACE": "lo",
        "CCL_WORKER_COUNT": "1",
        "CCL_LOG_LEVEL": "error",
    }


class Store(Protocol):
    """The part of a torch store that two ranks meet by."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Failure(Exception):
    """oneCCL threw; the text is its own."""


_initializing = threading.Lock()


@functools.cache
def _shim() -> ctypes.CDLL:
    shim = ctypes.CDLL(os.path.join(os.environ[FOLDER], "lib", SHIM))
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: Mapping[str, tuple[Any, list[Any]]] = {
        "last_error": (ctypes.c_char_p, []),
        "initialize": (number, []),
        "address_size": (size, []),
        "offer": (pointer, [ctypes.c_char_p]),
        "answer": (pointer, [ctypes.c_char_p]),
        "connect_pair": (number, [pointer, number]),
        "free_pair": (None, [pointer]),
        "post_send": (pointer, [pointer, pointer, size, number]),
        "post_receive": (pointer, [pointer, pointer, size, number]),
        "test_event": (number, [pointer]),
        "wait_event": (number, [pointer]),
        "free_event": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(shim, name)
        function.restype, function.argtypes = result, arguments
    return shim


def _checked(result: Any) -> Any:
    if result is None or result == -1:
        raise Failure(_shim().last_error().decode())
    return result


@functools.cache
def _initialized() -> ctypes.CDLL:
    shim = _shim()
    # Of ranks that share a machine, as the launcher would say it.
    os.environ.setdefault("CCL_LOCAL_RANK", os.environ.get("RANK", "0"))
    os.environ.setdefault("CCL_LOCAL_SIZE", os.environ.get("WORLD_SIZE", "2"))
    _checked(shim.initialize())
    return shim


class Work:
    """One posted operation.  Keeps its tensor alive: oneCCL has only the address."""

    def __init__(self, event: Any, tensor: Tensor) -> None:
        self._event = event
        self._tensor = tensor

    def is_completed(self) -> bool:
        return bool(_checked(_shim().test_event(self._event)))

    def wait(self) -> bool:
        """Block until it is complete; again and again, if asked."""
        _checked(_shim().wait_event(self._event))
        return True

    def exception(self) -> Exception | None:
        """Nothing: what fails raises where it is asked or waited for."""
        return None

    def __del__(self) -> None:
        _shim().free_event(self._event)


class Group:
    """A communicator of ranks 0 and 1, of use once both have called `connect`.

    To make one waits for rank 0 to have made it, on `store`.
    """

    def __init__(self, store: Store, rank: int) -> None:
        with _initializing:
            shim = _initialized()
        if rank == 0:
            address = ctypes.create_string_buffer(shim.address_size())
            self._pair = _checked(shim.offer(address))
            store.set("address", address.raw.hex())
        else:
            address = bytes.fromhex(store.get("address").decode())
            self._pair = _checked(shim.answer(address))
        self._rank = rank

    def connect(self) -> Group:
        """Block until the other rank connects too; returns the group itself.

        Processes that connect several must do it in the same order: in crossed orders
        neither call ever returns.
        """
        _checked(_shim().connect_pair(self._pair, self._rank))
        return self

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Work:
        (tensor,) = tensors
        return Work(
            _checked(_shim().post_send(self._pair, tensor.data_ptr(), tensor.nbytes, dst)), tensor
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Work:
        (tensor,) = tensors
        return Work(
            _checked(_shim().post_receive(self._pair, tensor.data_ptr(), tensor.nbytes, src)),
            tensor,
        )

    def shutdown(self) -> None:
        """Release the communicator; nothing may be pending."""
        pair, self._pair = self._pair, None
        _shim().free_pair(pair)
