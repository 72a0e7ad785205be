"""What each rank does while a fault is injected.

Ranks 0 and 1 are on the first host, rank 2 is on the second.  Rank 0 sends numbered
messages to rank 2, one of them huge; rank 2 checks each and acknowledges it.
Meanwhile ranks 0 and 1 exchange messages of their own, and every rank has a receive
pending from every rank of the other host.

Each rank says what happens, and ends when told to.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
from commlayer_testkit.conformance.ranks import here
from hosts.network import enter

import commlayer
from commlayer import CommError, Communicator

NEAR, BESIDE, FAR = 0, 1, 2
MESSAGES = 12
HUGE_AT = 4
WATCH, BULK, OWN = 1, 2, 3
"""Tags."""
PATIENCE = 100.0
"""Seconds that anything may take before this program gives up by itself."""

_speaking = threading.Lock()


def say(what: str, **details: Any) -> None:
    with _speaking:
        here.say({"what": what, "at": time.monotonic(), **details})


def watch(comm: Communicator, peer: int) -> None:
    """Say when and why the connection with `peer` ends."""
    try:
        comm.irecv(None, peer, tag=WATCH).wait()
    except CommError as error:
        say("ended", peer=peer, kind=error.kind.value, message=str(error))


def lost(error: CommError, peer: int) -> None:
    say("lost", peer=peer, kind=error.kind.value, message=str(error))


def send(comm: Communicator, elements: int) -> None:
    """Rank 0: numbered messages to rank 2, each waited for until it is acknowledged."""
    acknowledged = []
    try:
        for number in range(MESSAGES):
            size = elements if number == HUGE_AT else 1000 * (number + 1)
            sent = comm.isend(torch.full((size,), number + 1, dtype=torch.int32), FAR, tag=BULK)
            assert comm.irecv_object(FAR).result(PATIENCE) == number
            sent.wait(PATIENCE)
            acknowledged.append(number)
    except CommError as error:
        lost(error, FAR)
        for call in (lambda: sent.wait(PATIENCE), lambda: comm.send(torch.ones(3), FAR)):
            try:
                call()
            except CommError as again:
                say("also", kind=again.kind.value)
    say("sent", acknowledged=acknowledged)


def receive(comm: Communicator, elements: int) -> None:
    """Rank 2: check and acknowledge; say when the huge message has begun to arrive."""
    received: list[int] = []
    try:
        for number in range(MESSAGES):
            size = elements if number == HUGE_AT else 1000 * (number + 1)
            target = torch.zeros(size, dtype=torch.int32)
            arriving = comm.irecv(target, NEAR, tag=BULK)
            if number == HUGE_AT:
                while not target[size // 16] and not arriving.is_completed():
                    time.sleep(0.001)
                say("midway", whole=bool(target[-1]))
            arriving.wait(PATIENCE)
            assert bool((target == number + 1).all()), f"message {number} arrived otherwise"
            received.append(number)
            comm.isend_object(number, NEAR)
    except CommError as error:
        lost(error, NEAR)
    say("received", numbers=received)


def exchange(comm: Communicator, stop: threading.Event) -> None:
    """Ranks 0 and 1: messages of their own, back and forth, until rank 0 stops."""
    peer = BESIDE - comm.rank
    rounds = 0
    try:
        while True:
            ending = comm.rank == NEAR and stop.is_set()
            if comm.rank == NEAR:
                comm.send(torch.full((1000,), -1 if ending else rounds), peer, tag=OWN)
                assert ending or comm.recv(None, peer, tag=OWN)[-1] == rounds
            else:
                got = comm.recv(None, peer, tag=OWN)
                ending = bool(got[0] < 0)
                assert ending or got[0] == rounds
                if not ending:
                    comm.send(got, peer, tag=OWN)
            if ending:
                break
            rounds += 1
            if rounds % 100 == 0:
                say("rounds", rounds=rounds)
        say("exchanged", rounds=rounds)
    except BaseException as error:
        say("exchange failed", message=repr(error))
        raise


def play(hosts: list[str], elements: int, child: bool) -> None:
    """Be a rank, on one of `hosts` (namespaces, by rank)."""
    enter(hosts[here.rank()])
    comm = commlayer.connect()
    if child and comm.rank == FAR and os.fork() == 0:
        signal.pause()
    others = (FAR,) if comm.rank != FAR else (NEAR, BESIDE)
    for peer in others:
        threading.Thread(target=watch, args=(comm, peer), daemon=True).start()
    stop = threading.Event()
    own = threading.Thread(target=exchange, args=(comm, stop), daemon=True)
    if comm.rank != FAR:
        own.start()
    say("connected", pid=os.getpid())
    if comm.rank == NEAR:
        send(comm, elements)
    elif comm.rank == FAR:
        receive(comm, elements)
    here.hear()
    stop.set()
    if comm.rank != FAR:
        own.join(PATIENCE)
    try:
        comm.close(5)
    except CommError as error:
        say("close", message=str(error))
    say("end")
