"""How many calls of the device a message costs, beside ProcessGroupNCCL alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from devices.groups import group, until
from devices.groups import swap as swap_bare
from devices.pair import connect, needs_stand_in, swap
from devices.tensors import full, take_device
from ranks import here
from ranks.pool import Ranks
from standin import controls

MESSAGES = 20
KINDS = {
    "event creates": controls.EVENT_CREATES,
    "event destroys": controls.EVENT_DESTROYS,
    "records": controls.RECORDS,
    "stream waits": controls.STREAM_WAITS,
    "queries": controls.QUERIES,
    "kernels": controls.KERNELS,
    "set device": controls.SET_DEVICES,
}
BOUNDED = ("event creates", "event destroys", "records", "stream waits")
MOST = 1.2
"""Times the calls of ProcessGroupNCCL alone, those four together and the waits by themselves.

A receive records one event more than the transport: it is posted once its header is here, behind
what its caller's stream had been given when he asked for it.  Reused events make up for it.
"""
UNCACHED = {"event creates": 2.0, "event destroys": 1.0}
"""Per tensor, where torch finds no event in its cache: how often it does is the watchdog's luck."""

Calls = dict[str, float]


def per_message(exchange: Callable[[], object], over: Callable[[], object]) -> Calls:
    """What one `exchange` costs on this rank; `over` waits for all that it leaves behind."""
    for _ in range(3):
        exchange()
    over()
    with controls.counted() as calls:
        for _ in range(MESSAGES):
            exchange()
        over()
    return {kind: controls.total(calls, names) / MESSAGES for kind, names in KINDS.items()}


def alone(tensors: int, *, fresh: bool) -> Calls:
    """ProcessGroupNCCL: every tensor is posted, the last is waited for.

    `fresh`: the receiver allocates for every message, as one that learns the sizes by it does.
    """
    take_device()
    pg, peer = group(), 1 - here.rank()
    swap_bare(pg, peer, full(1), full(0))
    kept = [full(1) for _ in range(tensors)]
    post = pg.send if here.rank() == 0 else pg.recv

    def exchange() -> None:
        parts = [torch.empty_like(part) for part in kept] if fresh and here.rank() else kept
        for work in [post([part], peer, 0) for part in parts][-1:]:
            work.wait()
        torch.cuda.synchronize()

    calls = per_message(exchange, torch.cuda.synchronize)
    for kind, most in UNCACHED.items():
        calls[kind] = max(calls[kind], most * tensors)
    here.meet("counted alone")
    pg.shutdown()
    return calls


def one_tensor() -> tuple[Calls, Calls]:
    bare = alone(1, fresh=False)
    comm = connect()
    swap(comm)
    tensor = full(1)

    def exchange() -> None:
        handle = comm.isend(tensor, 1) if comm.rank == 0 else comm.irecv(tensor, 0)
        handle.wait()
        torch.cuda.synchronize()

    calls = per_message(exchange, lambda: until(lambda: not comm.ledger.snapshot().operations))
    here.meet("counted")
    comm.close()
    return bare, calls


def two_tensors() -> tuple[Calls, Calls]:
    bare = alone(2, fresh=True)
    comm = connect()
    swap(comm)
    tensors = {"hidden": full(1), "residual": full(2)}

    def exchange() -> None:
        if comm.rank == 0:
            comm.isend_tensor_dict(tensors, 1).wait()
        else:
            comm.irecv_tensor_dict(0).result()
        torch.cuda.synchronize()

    calls = per_message(exchange, lambda: until(lambda: not comm.ledger.snapshot().operations))
    here.meet("counted")
    comm.close()
    return bare, calls


def table(title: str, rows: dict[str, Calls]) -> str:
    lines = [f"\n{title:<34}" + "".join(f"{kind:>16}" for kind in KINDS)]
    for name, calls in rows.items():
        lines.append(f"{name:<34}" + "".join(f"{calls[kind]:>16.2f}" for kind in KINDS))
    return "\n".join(lines)


@needs_stand_in
@pytest.mark.parametrize("message", [one_tensor, two_tensors], ids=["tensor", "dict of two"])
def test_a_message_costs_few_more_calls_than_the_transport_alone(
    ranks: Ranks, message: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    sender, receiver = ranks.run(message, 2, timeout=90)
    rows = {
        "ProcessGroupNCCL alone, send": sender[0],
        "commlayer, send": sender[1],
        "ProcessGroupNCCL alone, receive": receiver[0],
        "commlayer, receive": receiver[1],
    }
    with capsys.disabled():
        print(table(f"calls per {message.__name__}".replace("_", " "), rows))
    for side, (bare, calls) in (("send", sender), ("receive", receiver)):
        most = MOST * sum(bare[kind] for kind in BOUNDED)
        assert sum(calls[kind] for kind in BOUNDED) <= most, side
        assert calls["stream waits"] <= MOST * bare["stream waits"], side
