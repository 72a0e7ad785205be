"""Stream-ordered transports: what a send holds up, and what reads memory too late.

Kernels are given to streams and run when the stream gets there, by address; the
caching allocator hands a freed block out again at once.
"""

from __future__ import annotations

from typing import Any

import torch

from commlayer_testkit.sim.failure import FailureKind
from commlayer_testkit.sim.profiles import GLOO, HCCL
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario

DEVICE = ("hccl", "nccl", "xccl")


# -- retention ----------------------------------------------------------------------


def _gather(out: torch.Tensor, source: torch.Tensor, index: torch.Tensor) -> None:
    out.copy_(source[index.long() % len(source)])


def _drafts(rank: Rank, *, retained: bool) -> None:
    """Two steps of an index made on the main stream and read on a side stream."""
    device, arena = rank.device, rank.arena
    side = device.stream("side")
    drafts = arena.full(9, 8)
    kept: list[Any] = []
    for step in range(2):
        index = arena.full(step, 8)
        side.wait_stream(device.current_stream())
        with side:
            out = arena.empty(8)
            device.launch(
                "gather drafts",
                lambda source, at, to: _gather(to, source, at),
                reads=[drafts, index],
                writes=[out],
            )
        if retained:
            device.record_stream(index, side)
        kept.append(out)
        del index
    device.synchronize()


@scenario("hccl", expect=FailureKind.USE_AFTER_FREE)
@on_ranks(1)
def side_stream_without_retention(rank: Rank) -> None:
    """An index made on the main stream is read on a side stream and dropped."""
    _drafts(rank, retained=False)


@scenario("hccl")
@on_ranks(1)
def side_stream_with_record(rank: Rank) -> None:
    """The cure: the index is recorded on the side stream; its bytes come back by themselves."""
    _drafts(rank, retained=True)
    assert rank.arena.in_use == 0, f"{rank.arena.in_use} bytes still in use"


@scenario("hccl")
@on_ranks(1)
def side_stream_own_tensor(rank: Rank) -> None:
    """A tensor made on the side stream itself needs nothing."""
    device, arena = rank.device, rank.arena
    side = device.stream("side")
    with side:
        for step in range(2):
            made = arena.full(step, 8)
            out = arena.empty(8)
            device.launch("copy", lambda a, b: b.copy_(a), reads=[made], writes=[out])
            del made, out
    device.synchronize()


def _device_send(rank: Rank, *, drop: bool) -> None:
    data, device, arena = rank.endpoint(), rank.device, rank.arena
    if rank.index == 0:
        for step in range(2):
            hidden = arena.full(step, 16)
            work = data.isend(hidden, 1)
            if not drop:
                work.wait()
            del hidden
        device.synchronize()
    else:
        for step in range(2):
            got = arena.empty(16)
            data.irecv(got, 0).wait()
            device.launch("check", lambda t, s=step: _expect(t, s), reads=[got])
            del got
        device.synchronize()


def _expect(tensor: torch.Tensor, value: int) -> None:
    assert int(tensor[0]) == value, f"expected {value}, got {int(tensor[0])}"


@scenario("nccl", "xccl")
@on_ranks(2)
def recorded_send_dropped(rank: Rank) -> None:
    """A transport that records its stream may have work and tensor dropped; bytes come back."""
    _device_send(rank, drop=True)


def _collective(rank: Rank, *, retained: bool) -> None:
    tokens, device, arena = rank.endpoint("tokens"), rank.device, rank.arena
    kept: list[Any] = []
    for step in range(2):
        slot = arena.full(step, 8) if rank.index == 0 else arena.empty(8)
        work = tokens.broadcast(slot, 0)
        if retained:
            kept.append((work, slot))
        del slot, work
    for work, _ in kept:
        work.wait()
    device.synchronize()
    kept.clear()


@scenario("nccl", expect=FailureKind.USE_AFTER_FREE)
@on_ranks(2)
def async_broadcast_dropped(rank: Rank) -> None:
    """The source of an asynchronous collective is dropped before its end event."""
    _collective(rank, retained=False)


@scenario("nccl")
@on_ranks(2)
def async_broadcast_held(rank: Rank) -> None:
    """The cure: held until the current stream is ordered after it."""
    _collective(rank, retained=True)


def _overwrite(rank: Rank, *, waits: bool) -> None:
    data, device, arena = rank.endpoint(), rank.device, rank.arena
    if rank.index == 0:
        hidden = arena.full(1, 16)
        for step in (2, 3):
            work = data.isend(hidden, 1)
            if waits:
                work.wait()
            device.launch(f"forward {step}", lambda t, s=step: t.fill_(s), writes=[hidden])
    else:
        for _ in range(2):
            got = arena.empty(16)
            data.irecv(got, 0).wait()
    device.synchronize()


@scenario("hccl", "nccl", expect=FailureKind.OVERWRITTEN)
@on_ranks(2)
def device_overwrite(rank: Rank) -> None:
    """The next forward pass writes a buffer that the communicator's stream is still sending."""
    _overwrite(rank, waits=False)


@scenario("hccl", "nccl")
@on_ranks(2)
def device_overwrite_ordered(rank: Rank) -> None:
    """The cure: the writing stream is ordered after the send."""
    _overwrite(rank, waits=True)


def _use(rank: Rank, *, waits: bool) -> None:
    data, device, arena = rank.endpoint(), rank.device, rank.arena
    tensor = arena.full(1, 16) if rank.index == 0 else arena.empty(16)
    if rank.index == 0:
        data.isend(tensor, 1).wait()
    else:
        work = data.irecv(tensor, 0)
        if waits:
            work.wait()
        device.launch("use", lambda t: None, reads=[tensor])
    device.synchronize()


@scenario("hccl", "nccl", "xccl", expect=FailureKind.EARLY_READ)
@on_ranks(2)
def result_used_unwaited(rank: Rank) -> None:
    """A kernel reads a received tensor on a stream that was not ordered after the receive."""
    _use(rank, waits=False)


@scenario("hccl", "nccl", "xccl")
@on_ranks(2)
def result_used_waited(rank: Rank) -> None:
    """The cure: wait on the stream that uses it."""
    _use(rank, waits=True)


@scenario("hccl", "nccl", "xccl")
@on_ranks(2)
def two_streams_wait(rank: Rank) -> None:
    """Two threads wait for one receive, each on a stream of its own; both are ordered."""
    data, device, arena = rank.endpoint(), rank.device, rank.arena
    tensor = arena.full(1, 16) if rank.index == 0 else arena.empty(16)
    if rank.index == 0:
        data.isend(tensor, 1).wait()
        device.synchronize()
        return
    work = data.irecv(tensor, 0)

    def consumer() -> None:
        with device.stream("consumer"):
            work.wait()
            device.launch("use", lambda t: _expect(t, 1), reads=[tensor])

    for thread in [rank.spawn(consumer, f"consumer {n}") for n in range(2)]:
        thread.join()
    device.synchronize()


# -- order ----------------------------------------------------------------------------


def _tokens_and_hidden(rank: Rank, *, channels: tuple[str, str]) -> None:
    """The sampler's broadcast is posted on a side stream, then the next step's hidden states."""
    tokens, data = rank.endpoint(channels[0]), rank.endpoint(channels[1])
    device, arena = rank.device, rank.arena
    side = device.stream("side")
    slot, hidden = arena.full(1, 8), arena.full(2, 16)
    if rank.index == 0:
        with side, rank.naming("broadcast of tokens"):
            tokens.broadcast(slot, 0).wait()
        with rank.naming("send of hidden states"):
            data.isend(hidden, 1).wait()
    else:
        with rank.naming("receive of hidden states"):
            data.irecv(hidden, 0).wait()
        with side, rank.naming("broadcast of tokens"):
            tokens.broadcast(slot, 0).wait()
    device.synchronize()


@scenario("hccl", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def broadcast_and_send_share_a_queue(rank: Rank) -> None:
    """A token broadcast and the next step's send go through one in-order communicator."""
    _tokens_and_hidden(rank, channels=("one", "one"))


@scenario("hccl", "nccl")
@on_ranks(2)
def broadcast_and_send_apart(rank: Rank) -> None:
    """The cure: a communicator for each."""
    _tokens_and_hidden(rank, channels=("tokens", "data"))


@scenario("xccl", "adversary_weakest", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def send_first_everywhere(rank: Rank) -> None:
    """Every rank posts its send first where a post may block until the peer receives."""
    data, peer = rank.endpoint(), 1 - rank.index
    source, target = filled(1, 16), blank(16)
    with rank.naming(f"send of rank {rank.index}"):
        send = data.isend(source, peer)
    recv = data.irecv(target, peer)
    send.wait()
    recv.wait()


def _opposite(rank: Rank, *, by_parity: bool) -> None:
    """Hidden states both ways, a communicator for each direction."""
    peer, arena = 1 - rank.index, rank.arena
    out = rank.endpoint(f"{rank.index} to {peer}")
    into = rank.endpoint(f"{peer} to {rank.index}")
    source, target = arena.full(1, 16), arena.empty(16)
    send_first = rank.index == 0 if by_parity else True
    works = []
    for sends in (send_first, not send_first):
        with rank.naming(f"{'send' if sends else 'receive'} of rank {rank.index}"):
            works.append(out.isend(source, peer) if sends else into.irecv(target, peer))
    for work in works:
        work.wait()
    rank.device.synchronize()


@scenario("nccl", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def first_use_of_a_pair(rank: Rank) -> None:
    """The first operation of a pair blocks the host while it connects, on both ranks."""
    _opposite(rank, by_parity=False)


@scenario("xccl", "nccl", "hccl")
@on_ranks(2)
def opposite_sends_by_parity(rank: Rank) -> None:
    """The cure: even ranks send first, odd ranks receive first."""
    _opposite(rank, by_parity=True)


def _crossed(rank: Rank, *, sends_first: bool, channels: tuple[str, str]) -> None:
    """One send and one receive on each rank."""
    peer, arena = 1 - rank.index, rank.arena
    upward, downward = (rank.endpoint(name) for name in channels)
    out, into = (upward, downward) if rank.index == 0 else (downward, upward)
    source, target = arena.full(1, 16), arena.empty(16)
    works = []
    for sends in (sends_first, not sends_first):
        with rank.naming(f"{'send' if sends else 'receive'} of rank {rank.index}"):
            works.append(out.isend(source, peer) if sends else into.irecv(target, peer))
    for work in works:
        work.wait()
    rank.device.synchronize()


@scenario("hccl_connected", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def crossed_on_one_stream(rank: Rank) -> None:
    """Each rank posts its send, then its receive, on one in-order communicator."""
    _crossed(rank, sends_first=True, channels=("one", "one"))


@scenario("hccl_connected", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def receives_first_on_one_stream(rank: Rank) -> None:
    """The same with the receive first: order within a batch cannot cure one stream."""
    _crossed(rank, sends_first=False, channels=("one", "one"))


@scenario("hccl_connected")
@on_ranks(2)
def crossed_on_two_streams(rank: Rank) -> None:
    """The cure: a communicator for each direction."""
    _crossed(rank, sends_first=True, channels=("up", "down"))


def _late_receive(rank: Rank, *, channels: tuple[str, str]) -> None:
    """A dict receive is posted first; its device part waits for the header and comes late."""
    peer, arena = 1 - rank.index, rank.arena
    headers = rank.endpoint("headers", GLOO)
    upward, downward = (rank.endpoint(name) for name in channels)
    out, into = (upward, downward) if rank.index == 0 else (downward, upward)
    got_header = blank(16)
    header_work = headers.irecv(got_header, peer)
    header, source, target = filled(1, 16), arena.full(1, 16), arena.empty(16)
    header_send = headers.isend(header, peer)
    with rank.naming(f"device send of rank {rank.index}"):
        send = out.isend(source, peer)
    header_work.wait()
    with rank.naming(f"late device receive of rank {rank.index}"):
        recv = into.irecv(target, peer)
    recv.wait()
    send.wait()
    header_send.wait()
    rank.device.synchronize()


@scenario("hccl_connected", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def late_device_receive(rank: Rank) -> None:
    """Both ranks post a dict receive, then a send; each device receive sits behind the send."""
    _late_receive(rank, channels=("one", "one"))


@scenario("hccl_connected")
@on_ranks(2)
def late_device_receive_apart(rank: Rank) -> None:
    """The cure: one communicator per direction."""
    _late_receive(rank, channels=("up", "down"))


def _batches(rank: Rank, *, sizes: tuple[int, int]) -> None:
    """Four messages from rank 0, posted and waited in batches; rank 1 answers each batch."""
    data = rank.endpoint("data", HCCL)
    reply = rank.endpoint("reply", HCCL)
    arena, size = rank.arena, sizes[rank.index]
    tensors = [arena.full(n, 16) for n in range(4)]
    answer = arena.full(9, 8)
    for start in range(0, 4, size):
        batch = tensors[start : start + size]
        post = data.isend if rank.index == 0 else data.irecv
        for work in [post(tensor, 1 - rank.index) for tensor in batch]:
            work.wait()
        rank.device.synchronize()
        with rank.naming(f"answer to batch at {start} of rank {rank.index}"):
            post = reply.irecv if rank.index == 0 else reply.isend
            post(answer, 1 - rank.index).wait()
        rank.device.synchronize()


@scenario("hccl", expect=FailureKind.DEADLOCK)
@on_ranks(2)
def batches_of_unequal_size(rank: Rank) -> None:
    """The two ranks cut the same messages into batches of different size."""
    _batches(rank, sizes=(2, 4))


@scenario("hccl")
@on_ranks(2)
def batches_of_equal_size(rank: Rank) -> None:
    """The cure: bounded batches, equal on both ranks."""
    _batches(rank, sizes=(2, 2))
