"""The engine's coordinator, stock and with commlayer, in one run on the same processes.

A turn is `MESSAGES` dicts of two tensors, one after the other; each is used by the
receiver, which answers with one byte.  Turns of stock and commlayer alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

SIZES = {"2 x 1 KiB": 1 << 10, "2 x 64 KiB": 1 << 16, "2 x 1 MiB": 1 << 20, "2 x 16 MiB": 1 << 24}


def messages(size: int) -> int:
    return 4 if size >= 1 << 24 else 20 if size >= 1 << 20 else 50


def turns(rounds: int, tables: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Medians of each turn in seconds, by size and contender; `tables` are their settings."""
    import groups
    from ranks import here

    contenders: dict[str, Any] = {}
    for name, table in tables.items():
        contenders[name] = groups.pipeline()
        if table is not None:
            ours = groups.installed(contenders[name], name=name, **table)
            # The engine's classes, unlike its groups, are shared by the contenders.
            assert ours.broadcasts is not None
            ours.broadcasts.uninstall()
    replies = dist.new_group(backend="gloo")
    rank = here.rank()
    results: dict[str, Any] = {}
    for label, size in SIZES.items():
        tensors = {key: torch.ones(size // 4) for key in ("hidden_states", "residual")}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            names = list(contenders)
            for name in names if number % 2 else reversed(names):
                turn = sends if rank == 0 else receives
                median = turn(contenders[name], tensors, messages(size), replies)
                if number:
                    times[name].append(median)
        results[label] = times
    here.meet("measured")
    for group in contenders.values():
        group.destroy()
    return results


def sends(group: Any, tensors: dict[str, Any], count: int, replies: Any) -> float:
    reply = torch.empty(1, dtype=torch.uint8)
    times = []
    for _ in range(count):
        replied = dist.irecv(reply, 1, group=replies)
        start = time.perf_counter()
        handles = group.isend_tensor_dict(tensors)
        replied.wait()
        times.append(time.perf_counter() - start)
        for handle in handles[1:]:
            handle.wait()
    return statistics.median(times)


def receives(group: Any, tensors: dict[str, Any], count: int, replies: Any) -> float:
    reply = torch.zeros(1, dtype=torch.uint8)
    for _ in range(count):
        result, handles, calls = group.irecv_tensor_dict()
        for handle in handles:
            handle.wait()
        for call in calls:
            call()
        assert result.keys() == tensors.keys()
        dist.send(reply, 0, group=replies)
    return 0.0


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    first, middle, third = statistics.quantiles(values, n=4)
    return first, middle, third


def measure(rounds: int, tables: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    from commlayer_testkit.conformance.ranks import pool

    ranks = pool.Ranks(["commlayer_gloo", "vllm.distributed.parallel_state"])
    try:
        first, second = ranks.spawn(
            turns, 2, rounds, tables, environment={"OMP_NUM_THREADS": "1"}, finalize=False
        )
        result: dict[str, Any] = first.result(1800)
        second.result(60)
        return result
    finally:
        ranks.close()


def show(result: dict[str, Any], write: Callable[[str], object] = print) -> None:
    """Median (quartiles) of the turns, and the ratio of the medians to the stock engine's."""
    write("| dict and a one-byte reply | wait mode | stock | commlayer | ratio (of the rounds) |")
    write("| --- | --- | ---: | ---: | ---: |")
    for label, times in result.items():
        base = times["stock"]
        for name in times:
            if name == "stock":
                continue
            ratios = [mine / stock for mine, stock in zip(times[name], base, strict=True)]
            low, _, high = quartiles(ratios)
            ratio = statistics.median(times[name]) / statistics.median(base)
            write(
                f"| {label} | {name} | {_text(base)} | {_text(times[name])} "
                f"| **{ratio:.2f}** ({low:.2f} to {high:.2f}) |"
            )


def _text(times: Sequence[float]) -> str:
    low, middle, high = (value * 1e3 for value in quartiles(times))
    return f"{middle:.3g} ms ({low:.3g} to {high:.3g})"
