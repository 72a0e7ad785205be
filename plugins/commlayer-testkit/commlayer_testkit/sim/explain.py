"""Who wrote what: recording in-place torch writes while a failing schedule is replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commlayer_testkit.sim.world import World, site


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, world: World) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = world.writes_seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for spec, value in zip(func._schema.arguments, args):  # noqa: B905
                if spec.is_write and isinstance(value, torch.Tensor):
                    self._seen[value.untyped_storage().data_ptr()] = site()
        return func(*args, **kwargs)


@contextmanager
def recording_writes(world: World) -> Iterator[None]:
    """Fill `World.writes_seen`: storage address to the line of its last torch write.

    Writes through numpy or `Tensor.data` are not seen.
    """
    with _Writes(world):
        yield
