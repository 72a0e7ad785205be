"""`torch.distributed.pipelining` over commlayer.

Replaced are the sends and receives of activations and gradients that its schedules
post.  With torch stay shape inference at the first step, and every other collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.pipelining import schedules

from commlayer import Communicator, Handle


@contextmanager
def carried_by(comm: Communicator, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Post what schedules send in `group` (default: the default group) through `comm`.

    Steps run in a ``with`` block; the ranks of `comm` are those of `group`, in order:
    ``connect(group=group)``.  Ops of other groups go on through torch.  Blocks nest,
    one for each group.  The function that is replaced is private to torch (2.8 to
    2.13 have it): there is no public seam.  Raises `AttributeError` where it is
    missing.  One block at a time in a process may be entered or left.
    """
    group = dist.group.WORLD if group is None else group
    original, torch_schedules = schedules._batch_p2p, cast(Any, schedules)

    def batch_p2p(ops: list[dist.P2POp], desc: str | None = None) -> Sequence[Any]:
        mine = [op for op in ops if op.group is group]
        others = [op for op in ops if op.group is not group]
        works: list[Any] = [_post(comm, op) for op in mine]
        return [*works, *(original(others, desc) if others else ())]

    torch_schedules._batch_p2p = batch_p2p
    try:
        yield
    finally:
        torch_schedules._batch_p2p = original


def _post(comm: Communicator, op: dist.P2POp) -> Handle:
    if op.op is dist.isend:
        return comm.isend(op.tensor, op.group_peer, op.tag)
    return comm.irecv(op.tensor, op.group_peer, op.tag)
