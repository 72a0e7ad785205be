"""L3: tensors of a device and its streams, between two devices of one host."""

from __future__ import annotations

from typing import Any

import torch

from commlayer_testkit.conformance.checks.tools import (
    LARGE,
    LIMIT,
    connected,
    digest,
    pattern,
    until,
)
from commlayer_testkit.conformance.gates import STREAM
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.conformance.verdict import CannotRun

_WORK = 64 << 20, 100
"""Bytes of a copy, and how many of them keep a stream busy.

Everything here moves bytes and computes nothing, so that it runs where kernels do not.
"""


def need_devices(lab: Lab, count: int = 2) -> None:
    """Raise `CannotRun` where this host has fewer devices than ranks."""
    kind = lab.subject.semantics.devices[0]
    found = torch.get_device_module(kind).device_count()
    if found < count:
        raise CannotRun(f"{found} devices of type {kind} here, and {count} are needed")
    lab.evidence["devices"] = count


def take_device(subject: Subject) -> tuple[torch.device, Any]:
    """The device of the calling rank, made current, and torch's module for it."""
    device = torch.device(subject.semantics.devices[0], here.rank())
    module = torch.get_device_module(device)
    module.set_device(device)
    return device, module


def mixed(subject: Subject) -> list[str]:
    device, _ = take_device(subject)
    comm = connected(subject)
    peer = 1 - comm.rank
    sent = {
        "d": pattern(comm.rank).to(device),
        "h": pattern(comm.rank, 1),
        "e": torch.empty(0, device=device),
        "t": pattern(comm.rank, 2).to(device).reshape(512, -1).t(),
    }
    send = comm.isend_tensor_dict(sent, peer)
    got = comm.recv_tensor_dict(peer)
    kinds = [got[key].device.type for key in sent]
    assert kinds == [tensor.device.type for tensor in sent.values()], f"tensors came to {kinds}"
    send.wait()
    found = [digest(tensor) for tensor in got.values()]
    comm.close(LIMIT)
    return found


@rule(Level.L3, "device-values", STREAM)
def device_values(lab: Lab) -> None:
    """A dict of device, host, empty and transposed tensors, both ways at once."""
    need_devices(lab)
    found = lab.run(mixed, 2)
    for rank in range(2):
        peer = 1 - rank
        turned = pattern(peer, 2).reshape(512, -1).t()
        wanted = [pattern(peer), pattern(peer, 1), torch.empty(0), turned]
        assert found[rank] == [digest(tensor) for tensor in wanted], f"rank {rank}"


def ordered(subject: Subject) -> str:
    device, module = take_device(subject)
    comm = connected(subject)
    wanted = pattern(1).to(device)
    if comm.rank == 0:
        nbytes, times = _WORK
        busy, copy = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
        source = torch.zeros_like(wanted)
        for _ in range(times):
            copy.copy_(busy)
        source.copy_(wanted)
        comm.isend(source, 1).wait()
        source.zero_()
        module.synchronize()
        comm.close(LIMIT)
        return ""
    got = comm.irecv(torch.zeros_like(wanted), 0)
    got.wait()
    found = digest(got.result().clone())
    comm.close(LIMIT)
    return found


@rule(Level.L3, "stream-order", STREAM)
def stream_order(lab: Lab) -> None:
    """The source is written behind long work and cleared after the wait."""
    need_devices(lab)
    assert lab.run(ordered, 2)[1] == digest(pattern(1)), "read before or after its time"


def two_consumers(subject: Subject) -> list[str]:
    device, module = take_device(subject)
    comm = connected(subject)
    if comm.rank == 0:
        comm.send(pattern(1).to(device), 1)
        comm.close(LIMIT)
        return []
    handle = comm.irecv(torch.zeros(LARGE, dtype=torch.uint8, device=device), 0)
    copies = []
    for _ in range(2):
        with module.stream(module.Stream(device)):
            handle.wait()
            copies.append(handle.result().clone())
    module.synchronize()
    found = [digest(copy) for copy in copies]
    comm.close(LIMIT)
    return found


@rule(Level.L3, "two-streams", STREAM)
def two_streams(lab: Lab) -> None:
    """One receive is waited for, and used, on two streams."""
    need_devices(lab)
    assert lab.run(two_consumers, 2)[1] == [digest(pattern(1))] * 2


def gives_back(subject: Subject) -> int:
    device, module = take_device(subject)
    comm = connected(subject)
    peer = 1 - comm.rank
    comm.isend(pattern(0).to(device), peer)
    comm.recv(None, peer)
    module.synchronize()
    before = module.memory_allocated()
    for step in range(20):
        comm.isend(pattern(step).to(device), peer)
        comm.irecv(None, peer).synchronize(LIMIT)
    until(lambda: not comm.ledger.snapshot().operations)
    module.synchronize()
    grown = int(module.memory_allocated() - before)
    comm.close(LIMIT)
    return grown


@rule(Level.L3, "device-released", STREAM)
def device_released(lab: Lab) -> None:
    """Twenty sends are dropped; what they held is free once the ledger is empty."""
    need_devices(lab)
    for rank, grown in enumerate(lab.run(gives_back, 2)):
        assert grown <= 0, f"rank {rank} still holds {grown} bytes"
