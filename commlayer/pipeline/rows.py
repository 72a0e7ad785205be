"""Deferred results that are written to rows, which other requests may have taken over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commlayer.pipeline.deferred import DeferredBroadcast


class RowGenerations:
    """Counts for each of `rows` rows how often it was given to another request.

    Every rank counts for itself, at the same places of the schedule.
    """

    def __init__(self, rows: int) -> None:
        self._generations = [0] * rows

    def reuse(self, row: int) -> None:
        """`row` belongs to another request from now on."""
        self._generations[row] += 1

    def __getitem__(self, row: int) -> int:
        return self._generations[row]

    def __len__(self) -> int:
        return len(self._generations)


class DeferredRows:
    """A deferred broadcast whose result has one entry for each of some rows.

    A row that is reused between `post` and `write` is left alone: what was
    sampled for its former request is dropped.  Ranks that disagree about the rows
    of a step or their generations get an error instead (see `DeferredBroadcast`).
    """

    def __init__(self, deferred: DeferredBroadcast, generations: RowGenerations) -> None:
        self._deferred = deferred
        self._generations = generations
        self._rows: tuple[int, ...] = ()
        self._posted: tuple[int, ...] = ()

    def post(
        self,
        step: int,
        rows: Sequence[int],
        tensor: Tensor | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Broadcast `tensor` of the source, of shape (rows,) or (rows, width), as `step`'s result.

        `rows` are distinct.  Otherwise as `DeferredBroadcast.post`.
        """
        rows = tuple(rows)
        if len(set(rows)) != len(rows) or not all(0 <= r < len(self._generations) for r in rows):
            raise ValueError(f"rows must be distinct and below {len(self._generations)}: {rows}")
        if tensor is not None and (tensor.dim() not in (1, 2) or tensor.shape[0] != len(rows)):
            raise ValueError(f"a tensor of shape {list(tensor.shape)} is not of {len(rows)} rows")
        posted = tuple(self._generations[row] for row in rows)
        self._deferred.post(step, tensor, agreed=(*rows, *posted), timeout=timeout)
        self._rows, self._posted = rows, posted

    def skip(self, step: int, *, timeout: float | None = None) -> None:
        """As `DeferredBroadcast.skip`."""
        self._deferred.skip(step, timeout=timeout)
        self._rows = self._posted = ()

    def write(self, target: Tensor, timeout: float | None = None) -> tuple[int, ...]:
        """Take the result and write it to its rows of `target`; returns the rows left alone.

        `target` has shape (all rows,) or (all rows, at least the width that was
        sent); beyond that width it is left as it is.  Values are converted to its
        dtype.  A skipped step writes nothing.
        """
        result: Tensor | None = self._deferred.take(timeout, skipped=None)
        if result is None:
            return ()
        fresh = [i for i, row in enumerate(self._rows) if self._generations[row] == self._posted[i]]
        rows = [self._rows[i] for i in fresh]
        if rows:
            index = torch.tensor(rows, device=target.device)
            values = result[fresh].to(target)
            if values.dim() == 1:
                target[index] = values
            else:
                target[index, : values.shape[1]] = values
        return tuple(row for row in self._rows if row not in rows)
