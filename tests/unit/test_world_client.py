"""The client of the store that a transport gets for one communicator."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from commlayer.backend import World


def test_it_waits_as_long_as_connecting_may_take() -> None:
    """Not as long as the one try in which the store was reached."""
    store = dist.PrefixStore("round", dist.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=2)))
    client = World(0, 1, store, 60.0).client()  # type: ignore[arg-type]
    assert client.timeout == timedelta(seconds=60)  # type: ignore[attr-defined]
    assert store.timeout == timedelta(seconds=2)


def test_a_store_without_clones_is_given_as_it_is() -> None:
    class Plain:
        def set(self, key: str, value: bytes) -> None: ...

        def get(self, key: str) -> bytes:
            return b""

        def check(self, keys: list[str]) -> bool:
            return False

    store = Plain()
    assert World(0, 1, store, 60.0).client() is store
