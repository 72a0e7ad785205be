"""L2: the library over the real transport, between processes of one host.

What was sent and what arrived are compared by digests that travel through the
store and the pipes of the kit, never through the transport under test.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from commlayer.device.backend import StreamBackend
from commlayer.errors import CommError, ErrorKind
from commlayer.handle import Handle
from commlayer_testkit.conformance.checks.tools import (
    LARGE,
    LIMIT,
    SMALL,
    connected,
    digest,
    pattern,
    until,
)
from commlayer_testkit.conformance.gates import ANY_THREAD, UNFINISHED
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.rules import Level, rule
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.expecting import PREMATURE, expect_error, expires


def both_send_first(subject: Subject) -> list[str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    sends = []
    for elements in (SMALL, LARGE):
        tensor = pattern(comm.rank, elements, elements=elements)
        sends += [
            comm.isend(tensor, peer),
            comm.isend_object({"t": tensor}, peer),
            comm.isend_tensor_dict({"t": tensor, "n": elements}, peer),
        ]
    here.meet("all sends are posted, no receive is")
    found = []
    for _ in (SMALL, LARGE):
        found += [comm.recv(None, peer), comm.recv_object(peer)["t"]]
        found.append(comm.recv_tensor_dict(peer)["t"])
    for send in sends:
        send.wait(LIMIT)
    comm.close()
    return [digest(tensor) for tensor in found]


@rule(Level.L2, "post-returns")
def post_returns(lab: Lab) -> None:
    """Two ranks post small and large tensors, objects and dicts, then meet, then receive."""
    found = lab.run(both_send_first, 2)
    for rank in range(2):
        sent = [pattern(1 - rank, n, elements=n) for n in (SMALL, LARGE) for _ in range(3)]
        assert found[rank] == [digest(tensor) for tensor in sent], f"rank {rank} got other bytes"


def overwrite_after_wait(subject: Subject) -> list[str]:
    comm = connected(subject)
    received = []
    buffer = torch.empty(3 << 18, dtype=torch.uint8)
    if comm.rank == 1:
        time.sleep(PREMATURE)
    for step in range(8):
        if comm.rank == 0:
            buffer.copy_(pattern(step, elements=3 << 18))
            comm.isend(buffer, 1).wait(LIMIT)
            buffer.fill_(0)
        else:
            received.append(digest(comm.irecv(buffer, 0).result(LIMIT)))
    here.meet("all waits have returned")
    comm.close()
    return received


@rule(Level.L2, "wait-usable")
def wait_usable(lab: Lab) -> None:
    """One buffer is sent eight times and cleared after each wait; its receiver comes late."""
    wanted = [digest(pattern(step, elements=3 << 18)) for step in range(8)]
    assert lab.run(overwrite_after_wait, 2)[1] == wanted, "rank 1 got other bytes"


def waits_in_any_order(subject: Subject) -> bool:
    comm = connected(subject)
    peer = 1 - comm.rank
    handles = [
        comm.irecv(None, peer),
        comm.irecv_object(peer),
        comm.broadcast(torch.arange(3), 0, async_op=True),
        comm.isend(pattern(comm.rank), peer),
        comm.isend_object({"x": 1}, peer),
    ]
    for handle in reversed(handles):
        handle.wait(LIMIT)
    first = [handle.result() for handle in handles]
    comm.close()
    for handle, result in zip(handles, first, strict=True):
        handle.wait()
        handle.synchronize(0)
        assert handle.result(0) is result, "another result after close"
        assert handle.is_completed()
        assert handle.exception() is None
    return bool(torch.equal(first[0], pattern(peer)))


@rule(Level.L2, "wait-again")
def wait_again(lab: Lab) -> None:
    """Five kinds of handle are waited in reverse, and all again after `close`."""
    assert lab.run(waits_in_any_order, 2) == [True, True], "a rank got other bytes"


def waits_from_threads(subject: Subject) -> int:
    comm = connected(subject)
    peer = 1 - comm.rank
    receive = comm.irecv(None, peer)
    results: list[Any] = []

    def wait() -> None:
        results.append(receive.result(LIMIT))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    here.meet("waiting")
    send = comm.isend(pattern(1), peer)
    threads += [threading.Thread(target=send.wait, args=(LIMIT,)) for _ in range(4)]
    for thread in threads[4:]:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    same = sum(result is results[0] for result in results)
    comm.close()
    return same


@rule(Level.L2, "wait-threads", ANY_THREAD)
def wait_threads(lab: Lab) -> None:
    """Four threads wait for a receive and four for a send."""
    assert lab.run(waits_from_threads, 2) == [4, 4], "not every thread got the result"


def tiny_timeouts(subject: Subject) -> list[str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    receives: list[Handle] = [comm.irecv(None, peer), comm.irecv_tensor_dict(peer)]
    send = comm.isend(pattern(comm.rank, 5), peer, tag=5)
    for handle in (*receives, send):
        for limit in (0, 1e-9, 1e-4, 0.05):
            assert expires(handle.synchronize, limit), (
                f"complete within {limit} s, and the peer has not posted"
            )
        assert handle.exception() is None, f"a timeout changed something: {handle.exception()}"
    here.meet("everything timed out")
    comm.isend(pattern(comm.rank, 6), peer)
    comm.isend_tensor_dict({"t": pattern(comm.rank, 7)}, peer)
    found = [comm.recv(None, peer, tag=5), receives[0].result(LIMIT)]
    found.append(receives[1].result(LIMIT)["t"])
    send.wait(LIMIT)
    comm.drain(LIMIT)
    comm.close()
    return [digest(tensor) for tensor in found]


@rule(Level.L2, "timeout-harmless")
def timeout_harmless(lab: Lab) -> None:
    """Limits from 0 to 50 ms expire on receives and a large send before the peer posts."""
    found = lab.run(tiny_timeouts, 2)
    for rank in range(2):
        wanted = [digest(pattern(1 - rank, key)) for key in (5, 6, 7)]
        assert found[rank] == wanted, f"rank {rank} got other bytes after its timeouts"


def odd_timeouts(subject: Subject) -> float:
    comm = connected(subject)
    peer = 1 - comm.rank
    receive = comm.irecv(None, peer)
    for bad in (-1, -1e-9, math.nan, -math.inf):
        try:
            receive.wait(bad)
        except ValueError:
            continue
        raise AssertionError(f"wait({bad}) was accepted")
    here.meet("refused")
    comm.isend(torch.ones(LARGE), peer)
    total = float(receive.result(math.inf).sum())
    receive.wait(1e300)
    comm.close()
    return total


@rule(Level.L2, "timeout-values")
def timeout_values(lab: Lab) -> None:
    """Negative, NaN and infinite limits on a pending receive."""
    assert lab.run(odd_timeouts, 2) == [LARGE, LARGE]


def complete_unwaited(subject: Subject, elements: int) -> list[str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    receives: list[Handle] = [comm.irecv(None, peer), comm.irecv_tensor_dict(peer)]
    early = [handle.is_completed() for handle in receives]
    assert early == [False, False], "a receive is complete before anything was sent"
    here.meet("receives are posted and pending")
    sends = [comm.isend(pattern(1, elements=elements), peer)]
    sends.append(comm.isend_tensor_dict({"t": pattern(2, elements=elements)}, peer))
    for handle in (*receives, *sends):
        until(handle.is_completed)
    found = [receives[0].result(0), receives[1].result(0)["t"]]
    comm.close()
    return [digest(tensor) for tensor in found]


@rule(Level.L2, "completed-unwaited")
def completed_unwaited(lab: Lab) -> None:
    """Small and large handles are only ever asked `is_completed`."""
    for elements in (SMALL, LARGE):
        wanted = [digest(pattern(key, elements=elements)) for key in (1, 2)]
        for found in lab.run(complete_unwaited, 2, elements):
            assert found == wanted, "complete, and the bytes are not there"


def not_complete_early(subject: Subject) -> None:
    comm = connected(subject)
    if comm.rank == 0:
        comm.send(pattern(0), 1)
        send = comm.isend(pattern(1, elements=LARGE * 16), 1)
        early = send.is_completed() or not expires(send.synchronize) or send.is_completed()
        assert not early, "complete before the peer posted"
        here.meet("looked")
        send.wait(LIMIT)
        assert send.is_completed()
    else:
        comm.recv(None, 0)
        here.meet("looked")
        comm.recv(None, 0)
    comm.close()


@rule(Level.L2, "completed-exact", UNFINISHED)
def completed_exact(lab: Lab) -> None:
    """A send of 4 MiB, to a peer that has received before, is asked before that asks again."""
    lab.run(not_complete_early, 2)


def errors_stay(subject: Subject) -> None:
    comm = connected(subject)
    if comm.rank == 0:
        comm.isend(torch.ones(3), 1)
        comm.isend(torch.full((4,), 2.0), 1)
        comm.drain(LIMIT)
    else:
        wrong = comm.irecv(torch.empty(2), 0)
        good = [comm.irecv(torch.empty(4), 0) for _ in range(2)]
        errors = {
            str(expect_error(ErrorKind.PROTOCOL, lambda: wrong.wait(LIMIT))) for _ in range(3)
        }
        assert errors == {str(wrong.exception())}, f"different errors: {errors}"
        assert wrong.is_completed()
        assert [handle.result(LIMIT).tolist() for handle in good] == [[1] * 3, [2] * 4]
    comm.close()


@rule(Level.L2, "error-repeats")
def error_repeats(lab: Lab) -> None:
    """A receive of the wrong size is waited three times."""
    lab.run(errors_stay, 2)


def churn_memory() -> None:
    """Collect garbage, and write over what a freed buffer may have left."""
    gc.collect()
    for elements in (SMALL, LARGE, LARGE * 4):
        for _ in range(4):
            torch.full((elements,), 0xAB, dtype=torch.uint8)


def drop_everything(subject: Subject, sizes: Sequence[int]) -> list[str]:
    comm = connected(subject)
    if comm.rank == 0:
        for number, elements in enumerate(sizes):
            comm.isend(pattern(number, elements=elements), 1)
            comm.isend_tensor_dict({"t": pattern(number, 1, elements=elements)}, 1)
            churn_memory()
        here.meet("all dropped")
        churn_memory()
        comm.close(LIMIT)
        return []
    here.meet("all dropped")
    found = []
    for elements in sizes:
        if elements == LARGE:
            time.sleep(PREMATURE)  # its header has come, and its payload is not asked for
        found.append(digest(comm.recv(None, 0)))
        found.append(digest(comm.recv_tensor_dict(0)["t"]))
    comm.close(LIMIT)
    return found


@rule(Level.L2, "dropped-handle")
def dropped_handle(lab: Lab) -> None:
    """Handles and sources are dropped before the peer posts; garbage is collected and churned."""
    sizes = (0, SMALL, LARGE, LARGE * 4)
    wanted = []
    for number, elements in enumerate(sizes):
        wanted.append(digest(pattern(number, elements=elements)))
        wanted.append(digest(pattern(number, 1, elements=elements)))
    assert lab.run(drop_everything, 2, sizes)[1] == wanted, "a dropped send did not arrive whole"


def hog(stop: threading.Event) -> None:
    """Keep the interpreter busy."""
    while not stop.is_set():
        sum(range(2000))


def exchange_while_busy(subject: Subject) -> list[str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    stop = threading.Event()
    thread = threading.Thread(target=hog, args=(stop,), daemon=True)
    thread.start()
    found = []
    for step in range(5):
        send = comm.isend(pattern(comm.rank, step), peer)
        found.append(digest(comm.recv(None, peer)))
        until(send.is_completed)
    stop.set()
    thread.join()
    comm.close(LIMIT)
    return found


@rule(Level.L2, "busy-interpreter")
def busy_interpreter(lab: Lab) -> None:
    """Five exchanges beside a thread that never gives the interpreter up by itself."""
    found = lab.run(exchange_while_busy, 2)
    for rank in range(2):
        wanted = [digest(pattern(1 - rank, step)) for step in range(5)]
        assert found[rank] == wanted, f"rank {rank} got other bytes"


def settles(subject: Subject) -> tuple[int, int, int]:
    comm = connected(subject)
    peer = 1 - comm.rank
    received = []
    for elements in (0, SMALL, LARGE):
        comm.isend(pattern(1, elements=elements), peer)
        comm.isend_object([pattern(2, elements=elements)], peer)
        received += [comm.irecv(None, peer), comm.irecv_object(peer)]
    if isinstance(subject.loaded.backend, StreamBackend):
        # Receives of device memory are posted inside calls of the user: to ask is one.
        until(lambda: all(each.is_completed() for each in received))
    received.clear()
    until(lambda: not comm.ledger.snapshot().operations)
    snapshot = comm.ledger.snapshot()
    comm.close(LIMIT)
    return snapshot.sends, snapshot.bytes, len(snapshot.quarantined)


@rule(Level.L2, "released", ANY_THREAD)
def released(lab: Lab) -> None:
    """Nobody waits; the ledger is watched until it is empty."""
    assert lab.run(settles, 2) == [(0, 0, 0)] * 2, "sends or bytes are still counted"


def at_the_bound(subject: Subject) -> tuple[str, int]:
    comm = connected(subject, max_inflight_ops=2, on_full="raise")
    if comm.rank == 0:
        for _ in range(2):
            comm.isend(pattern(1, elements=LARGE * 16), 1)
        assert expires(comm.drain), "complete, and the peer has not posted"
        error = expect_error(ErrorKind.FULL, lambda: comm.isend(pattern(2), 1))
        here.meet("full")
        comm.drain(LIMIT)
        comm.send(pattern(3), 1)
        peak = comm.ledger.snapshot().peak_sends
        comm.close(LIMIT)
        return error.kind.value, peak
    here.meet("full")
    for _ in range(2):
        comm.recv(None, 0)
    found = digest(comm.recv(None, 0))
    comm.close(LIMIT)
    return found, 0


@rule(Level.L2, "bound-raises", UNFINISHED)
def bound_raises(lab: Lab) -> None:
    """A third send of 4 MiB beyond a bound of two is refused; after a drain the next goes."""
    (kind, peak), (received, _) = lab.run(at_the_bound, 2)
    assert (kind, peak) == ("full", 2), f"{kind}, and {peak} sends were in flight"
    assert received == digest(pattern(3)), "the message after the refused one is another"


def in_order(subject: Subject) -> list[str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    sizes = [(LARGE, SMALL, 0, LARGE * 2)[n % 4] for n in range(24)]
    for number, elements in enumerate(sizes):
        comm.isend(pattern(comm.rank, number, elements=elements), peer, tag=number % 3)
    order = [n for tag in (2, 0, 1) for n in range(tag, 24, 3)]
    found = {n: digest(comm.recv(None, peer, tag=n % 3)) for n in order}
    comm.close(LIMIT)
    return [found[n] for n in range(24)]


@rule(Level.L2, "order")
def order(lab: Lab) -> None:
    """Twenty-four messages on three tags, small and large; the tags are received one by one."""
    found = lab.run(in_order, 2)
    sizes = [(LARGE, SMALL, 0, LARGE * 2)[n % 4] for n in range(24)]
    for rank in range(2):
        wanted = [digest(pattern(1 - rank, n, elements=sizes[n])) for n in range(24)]
        assert found[rank] == wanted, f"rank {rank}: {found[rank]}"


def every_value() -> Iterator[torch.Tensor]:
    """Tensors of every kind that is promised."""
    base = torch.arange(48, dtype=torch.float32)
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
        torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
    ):  # fmt: skip
        yield base.to(dtype).reshape(6, 8)
    yield torch.empty(0)
    yield torch.empty(3, 0, 2, dtype=torch.int64)
    yield torch.tensor(7.0)
    yield base.reshape(6, 8).t()
    yield base[::3]
    yield torch.arange(LARGE, dtype=torch.int32).reshape(-1, 8)[:, 1:5]


def sends_values(subject: Subject) -> list[str]:
    comm = connected(subject)
    found = []
    for tensor in every_value():
        if comm.rank == 0:
            comm.isend(tensor, 1)
        else:
            found.append(digest(comm.recv(None, 0)))
    comm.close(LIMIT)
    return found


@rule(Level.L2, "values")
def values(lab: Lab) -> None:
    """Eleven dtypes; empty, scalar, transposed, strided and large tensors."""
    wanted = [digest(tensor) for tensor in every_value()]
    found = lab.run(sends_values, 2)[1]
    wrong = [n for n, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    assert not wrong, f"other bytes arrived for the tensors {wrong} of {len(wanted)}"


def sends_dicts(subject: Subject) -> tuple[list[str], list[str], Any]:
    comm = connected(subject)
    value = {
        "b": pattern(1), "a": torch.empty(0), "n": None, "flags": (True, 2, 3.5, "x", b"y"),
        "nested": {"deep": [pattern(2, elements=SMALL)]}, "set": {1, 2},
    }  # fmt: skip
    if comm.rank == 0:
        comm.isend_tensor_dict(value, 1)
        comm.isend_object({"steps": [1, 2]}, 1)
        comm.close(LIMIT)
        return list(value), [], None
    got, obj = comm.recv_tensor_dict(0), comm.recv_object(0)
    comm.close(LIMIT)
    assert (got["n"], got["flags"], got["set"]) == (value["n"], value["flags"], value["set"])
    tensors = [got["b"], got["a"], got["nested"]["deep"][0]]
    return list(got), [digest(tensor) for tensor in tensors], obj


@rule(Level.L2, "dicts")
def dicts(lab: Lab) -> None:
    """Nested values, empty and large tensors in one dict; an object behind it."""
    sent, got = lab.run(sends_dicts, 2)
    assert got[0] == sent[0], f"the keys came in the order {got[0]}"
    tensors = (pattern(1), torch.empty(0), pattern(2, elements=SMALL))
    assert got[1] == [digest(tensor) for tensor in tensors], "other bytes arrived"
    assert got[2] == {"steps": [1, 2]}, f"the object arrived as {got[2]}"


def broadcasts(subject: Subject) -> list[str]:
    comm = connected(subject)
    handles = []
    for step, elements in enumerate((SMALL, LARGE, 0, 3)):
        source = step % comm.world_size
        tensor = pattern(step, elements=elements) if comm.rank == source else None
        handles.append(comm.broadcast(tensor, source, async_op=True))
    found = [digest(handle.result(LIMIT)) for handle in handles]
    comm.close(LIMIT)
    return found


@rule(Level.L2, "broadcast")
def broadcast(lab: Lab) -> None:
    """Four broadcasts in flight on 2 and on 4 ranks, from different ranks, of different widths."""
    wanted = [digest(pattern(step, elements=n)) for step, n in enumerate((SMALL, LARGE, 0, 3))]
    for size in (2, 4):
        for rank, found in enumerate(lab.run(broadcasts, size)):
            assert found == wanted, f"rank {rank} of {size} got another broadcast"


def all_pairs(subject: Subject) -> dict[int, str]:
    comm = connected(subject)
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    for peer in peers:
        comm.isend(pattern(comm.rank, peer), peer)
    found = {peer: digest(comm.recv(None, peer)) for peer in reversed(peers)}
    comm.close(LIMIT)
    return found


@rule(Level.L2, "peers-independent")
def peers_independent(lab: Lab) -> None:
    """Four ranks send to each other; each asks its peers in reverse order."""
    for rank, found in enumerate(lab.run(all_pairs, 4)):
        wanted = {peer: digest(pattern(peer, rank)) for peer in range(4) if peer != rank}
        assert found == wanted, f"rank {rank} got other bytes"


def unclaimed(subject: Subject) -> list[str]:
    comm = connected(subject, channels=("extra",))
    extra = comm.channel("extra")
    if comm.rank == 0:
        for number in range(3):
            comm.isend(pattern(number), 1, tag=1)
        comm.isend(pattern(7), 1, tag=2)
        extra.isend(pattern(8), 1)
        here.meet("the last asked for has come")
        comm.close(LIMIT)
        return []
    found = [extra.recv(None, 0), comm.recv(None, 0, tag=2)]
    here.meet("the last asked for has come")
    found += [comm.recv(None, 0, tag=1) for _ in range(3)]
    comm.close(LIMIT)
    return [digest(tensor) for tensor in found]


@rule(Level.L2, "tags-independent")
def tags_independent(lab: Lab) -> None:
    """Three large messages of tag 1 wait while tag 2, and another channel, are received."""
    wanted = [digest(pattern(key)) for key in (8, 7, 0, 1, 2)]
    assert lab.run(unclaimed, 2)[1] == wanted, "rank 1 got other bytes"


def mismatch(subject: Subject) -> list[str]:
    comm = connected(subject)
    if comm.rank == 0:
        comm.isend(pattern(1), 1)
        comm.isend(pattern(2), 1)
        comm.close(LIMIT)
        return []
    wrong = comm.irecv(torch.zeros(LARGE // 2, dtype=torch.uint8), 0)
    right = [comm.irecv(torch.zeros(LARGE, dtype=torch.uint8), 0) for _ in range(2)]
    expect_error(ErrorKind.PROTOCOL, lambda: wrong.wait(LIMIT))
    found = [digest(handle.result(LIMIT)) for handle in right]
    comm.close(LIMIT)
    return found


@rule(Level.L2, "size-mismatch")
def size_mismatch(lab: Lab) -> None:
    """A receive of half the size; the next receives get both messages, and no process dies."""
    wanted = [digest(pattern(number)) for number in (1, 2)]
    assert lab.run(mismatch, 2)[1] == wanted, "the next message is another"


def slow_receiver(subject: Subject) -> list[str]:
    comm = connected(subject)
    if comm.rank == 0:
        for step in range(12):
            comm.isend(pattern(step), 1)
        here.meet("posted")
        comm.close(LIMIT)
        return []
    here.meet("posted")
    found = []
    for _ in range(12):
        time.sleep(0.1)
        found.append(digest(comm.recv(None, 0)))
    comm.close(LIMIT)
    return found


@rule(Level.L2, "late-peer")
def late_peer(lab: Lab) -> None:
    """The receiver comes when all is posted, and takes one message every 0.1 s."""
    wanted = [digest(pattern(step)) for step in range(12)]
    assert lab.run(slow_receiver, 2)[1] == wanted, "rank 1 got other bytes"


def absent(subject: Subject) -> str:
    if here.rank() == 1:
        here.meet("rank 0 gave up")
        return ""
    try:
        subject.connect(connect_timeout=1.0)
    except CommError as error:
        here.meet("rank 0 gave up")
        return f"{error.kind.value}: {error}"
    raise AssertionError("connected, and rank 1 never called")


@rule(Level.L2, "absent-rank")
def absent_rank(lab: Lab) -> None:
    """Rank 1 never connects; the limit is 1 s."""
    text = lab.run(absent, 2)[0]
    assert text.startswith("timeout:"), text
    assert "rank 1" in text, f"rank 1 is not named: {text}"


def exchange_once(subject: Subject) -> str:
    comm = connected(subject)
    peer = 1 - comm.rank
    comm.isend(pattern(comm.rank), peer)
    found = digest(comm.recv(None, peer))
    comm.close(LIMIT)
    return found


@rule(Level.L2, "fresh-interpreters")
def fresh_interpreters(lab: Lab) -> None:
    """Two new interpreters, which inherit nothing, exchange 256 KiB."""
    found = lab.ranks(fresh=True).run(exchange_once, 2, lab.subject, timeout=90)
    lab.evidence["ranks"] = [2]
    assert found == [digest(pattern(1)), digest(pattern(0))], "a rank got other bytes"


def drains(subject: Subject) -> bool:
    comm = connected(subject)
    peer = 1 - comm.rank
    sends = [comm.isend(pattern(n, elements=n), peer) for n in (SMALL, LARGE * 16)]
    if not expires(comm.drain):
        assert subject.semantics.p2p.eager_bytes >= LARGE * 16, "drained too early"
    here.meet("drained in vain")
    receives = [comm.irecv(None, peer) for _ in sends]
    comm.drain(LIMIT)
    done = all(send.is_completed() for send in sends)
    for receive in receives:
        receive.wait(LIMIT)
    comm.close(LIMIT)
    return done


@rule(Level.L2, "drain")
def drain(lab: Lab) -> None:
    """A drain before the peer receives expires; one afterwards finds every send complete."""
    assert lab.run(drains, 2) == [True, True], "drained, and sends are not complete"


def closes(subject: Subject) -> tuple[str, str]:
    comm = connected(subject)
    if comm.rank == 0:
        pending = comm.irecv(None, 1, tag=9)
        comm.isend(pattern(1), 1)
        comm.close(LIMIT)
        return "", expect_error(ErrorKind.CLOSED, lambda: pending.wait(LIMIT)).kind.value
    pending = comm.irecv(None, 0, tag=9)
    found = digest(comm.recv(None, 0))
    error = expect_error(ErrorKind.CLOSED, lambda: pending.wait(LIMIT))
    comm.close(LIMIT)
    return found, error.kind.value


@rule(Level.L2, "close")
def close(lab: Lab) -> None:
    """One rank sends and closes at once; both have a receive that nobody answers."""
    (_, first), (received, second) = lab.run(closes, 2)
    assert received == digest(pattern(1)), "what was sent before the close is another message"
    assert (first, second) == ("closed", "closed")


def closes_in_flight(subject: Subject) -> str:
    comm = connected(subject)
    peer = 1 - comm.rank
    comm.irecv(None, peer, tag=1)
    comm.isend(pattern(1, elements=LARGE * 16), peer)
    here.meet("posted")
    try:
        comm.close(1.0)
    except CommError as error:
        return str(error)
    return "closed as if all was delivered"


@rule(Level.L2, "close-in-flight", UNFINISHED)
def close_in_flight(lab: Lab) -> None:
    """Both ranks close, with a limit of 1 s, while 4 MiB each way are not asked for."""
    for rank, text in enumerate(lab.run(closes_in_flight, 2)):
        assert "isend to rank" in text, f"rank {rank} names no undelivered send: {text}"


def exits_with(subject: Subject, code: int) -> None:
    comm = connected(subject, close_timeout=1.0)
    peer = 1 - comm.rank
    comm.irecv(None, peer)
    comm.isend(pattern(1), peer, tag=1)
    here.meet("posted")
    sys.exit(code)


@rule(Level.L2, "exit")
def exit_code(lab: Lab) -> None:
    """Both ranks leave by ``sys.exit(7)`` with a send and a receive pending."""
    processes = lab.spawn(exits_with, 2, 7)
    codes = [process.wait(30) for process in processes]
    assert codes == [7, 7], f"exit codes {codes}\n{processes[0].output}{processes[1].output}"


def forks(subject: Subject) -> tuple[int, str]:
    comm = connected(subject)
    peer = 1 - comm.rank
    in_flight = comm.isend(pattern(comm.rank), peer)
    child = os.fork()
    if child == 0:
        try:
            expect_error(ErrorKind.CLOSED, lambda: comm.isend(pattern(1), peer))
        except AssertionError:
            os._exit(1)
        os._exit(5)
    _, status = os.waitpid(child, 0)
    found = digest(comm.recv(None, peer))
    in_flight.wait(LIMIT)
    comm.close(LIMIT)
    return os.waitstatus_to_exitcode(status), found


@rule(Level.L2, "fork")
def fork(lab: Lab) -> None:
    """Each rank forks with a send in flight; the child is refused, the parent goes on."""
    found = lab.run(forks, 2)
    codes = [code for code, _ in found]
    assert codes == [5, 5], f"the children ended with exit codes {codes}"
    received = [received for _, received in found]
    assert received == [digest(pattern(1)), digest(pattern(0))], "a parent got other bytes"


def connects_again(subject: Subject) -> list[str]:
    found = []
    for generation in range(3):
        comm = connected(subject, name=f"again {generation}")
        peer = 1 - comm.rank
        comm.isend(pattern(generation, comm.rank), peer)
        found.append(digest(comm.recv(None, peer)))
        comm.close(LIMIT)
    return found


@rule(Level.L2, "reconnect")
def reconnect(lab: Lab) -> None:
    """Three communicators, one after another, in the same processes."""
    found = lab.run(connects_again, 2)
    for rank in range(2):
        wanted = [digest(pattern(generation, 1 - rank)) for generation in range(3)]
        assert found[rank] == wanted, f"rank {rank} got other bytes"
