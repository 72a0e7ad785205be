"""The library's own communicator on every device transport, beside gloo on the host.

Kernels check what was received, on the stream that waited for it; the arena and
the transport report memory that was freed, handed out again or overwritten too
early, and results that were read too early.  At quiescence nothing may be left,
though most scenarios never wait for a send.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle
from commlayer.pipeline.topology import FoldedTopology, Topology
from commlayer_testkit.sim.mount_core import connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank, blank, filled
from commlayer_testkit.sim.scenario import on_ranks, scenario
from commlayer_testkit.sim.world import World

DEVICE = ("hccl", "nccl", "xccl", "ccl_bindings")
STREAM = ("hccl", "nccl", "xccl")
NBYTES = 16


class Quiet:
    """What must hold of every rank's communicator and memory at quiescence.

    `config` are keys of `CommConfig` for every rank.
    """

    def __init__(self, world: World, **config: Any) -> None:
        self._config = config
        self._ranks: list[tuple[Rank, Communicator]] = []
        world.at_end(self._check)

    def connect(self, rank: Rank) -> Communicator:
        communicator = connect_device(rank, GLOO, **self._config)
        self._ranks.append((rank, communicator))
        return communicator

    def _check(self) -> None:
        gc.collect(0)
        for rank, communicator in self._ranks:
            snapshot = communicator.ledger.snapshot()
            assert not snapshot.operations, f"{rank.name} still lists {snapshot.operations}"
            assert not snapshot.quarantined, f"{rank.name} still holds {snapshot.quarantined}"
            assert snapshot.sends == snapshot.bytes == 0, f"{rank.name} still counts sends"
            assert rank.arena.in_use == 0, f"{rank.name} still uses {rank.arena.in_use} bytes"


def use(rank: Rank, tensor: torch.Tensor, value: int) -> None:
    """Launch a kernel that finds every byte of `tensor` to be `value`."""

    def check(data: torch.Tensor) -> None:
        assert data.tolist() == [value] * data.numel(), f"{data.tolist()} in place of {value}"

    rank.device.launch("use", check, reads=[tensor])


def overwrite(rank: Rank, tensor: torch.Tensor) -> None:
    rank.device.launch("overwrite", lambda data: data.fill_(0xEE), writes=[tensor])


def churn(rank: Rank) -> None:
    """Allocate and write what the allocator hands out again first."""
    overwrite(rank, rank.arena.empty(NBYTES))


def error_of(handle: Handle) -> CommError:
    """The error with which waiting for `handle` must end."""
    try:
        handle.synchronize(timeout=100.0)
    except CommError as error:
        return error
    raise AssertionError(f"{handle!r} went well")


# -- both ways ------------------------------------------------------------------------


def _contents(rank: Rank, value: int) -> list[dict[str, Any]]:
    """On the device, on the host (inline and not), and mixed."""
    full = rank.arena.full
    return [
        {"x": full(value, NBYTES), "n": value},
        {"small": filled(value), "large": filled(value, 40)},
        {"y": full(value, NBYTES), "large": filled(value, 40), "x": full(value, 2, 4), "n": value},
    ]


def _dicts(rank: Rank, quiet: Quiet) -> None:
    comm, peer = quiet.connect(rank), 1 - rank.index
    for content in _contents(rank, rank.index + 1):
        comm.isend_tensor_dict(content, peer)
        del content
        churn(rank)
    handles = [comm.irecv_tensor_dict(peer) for _ in range(3)]
    for handle in handles:
        for name, got in handle.result().items():
            if name in ("x", "y"):
                use(rank, got.view(-1), peer + 1)
            elif name != "n":
                assert got.tolist() == [peer + 1] * got.numel()
            else:
                assert got == peer + 1
            del got


@scenario(*DEVICE)
@on_ranks(2, partial(Quiet, inline_bytes=8))
def core_device_dicts(rank: Rank, quiet: Quiet) -> None:
    """Dicts on the device, on the host and mixed, both ways, sources dropped at once."""
    _dicts(rank, quiet)


@scenario(*STREAM)
@on_ranks(2, partial(Quiet, inline_bytes=8, retention="hold_until_event"))
def core_device_dicts_until_event(rank: Rank, quiet: Quiet) -> None:
    """The same with device memory held until its event."""
    _dicts(rank, quiet)


@scenario("hccl")
@on_ranks(2, partial(Quiet, inline_bytes=8, reaping="gate_on_device"))
def core_device_dicts_gated(rank: Rank, quiet: Quiet) -> None:
    """The same with entries released when their device part has ended."""
    _dicts(rank, quiet)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_sends_first(rank: Rank, quiet: Quiet) -> None:
    """All ranks send first, where a post may block until the peer receives or connects."""
    comm, peer = quiet.connect(rank), 1 - rank.index
    sends = [comm.isend(rank.arena.full(10 * rank.index + n, NBYTES), peer) for n in (1, 2)]
    for n in (1, 2):
        use(rank, comm.recv(None, peer), 10 * peer + n)
    for send in sends:
        send.wait()
        send.synchronize()
        assert send.is_completed()


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_receives_first(rank: Rank, quiet: Quiet) -> None:
    """Both ranks post a dict receive, then a send; the device receive is posted late."""
    comm, peer = quiet.connect(rank), 1 - rank.index
    receive = comm.irecv_tensor_dict(peer)
    comm.isend_tensor_dict({"x": rank.arena.full(rank.index, NBYTES)}, peer)
    use(rank, receive.result()["x"], peer)


@scenario(*DEVICE)
@on_ranks(3, Quiet)
def core_device_ring(rank: Rank, quiet: Quiet) -> None:
    """Three ranks, each sends to the next and receives from the one before."""
    comm = quiet.connect(rank)
    comm.isend(rank.arena.full(rank.index, NBYTES), (rank.index + 1) % 3)
    use(rank, comm.recv(None, (rank.index - 1) % 3), (rank.index - 1) % 3)


@scenario(*DEVICE)
@on_ranks(3, Quiet)
def core_device_broadcast(rank: Rank, quiet: Quiet) -> None:
    """A device tensor goes to two ranks, twice, with another width the second time."""
    comm = quiet.connect(rank)
    for width in (8, 16):
        mine = rank.arena.full(width, width) if rank.index == 1 else None
        handle = comm.broadcast(mine, 1, async_op=True)
        del mine
        if rank.index != 1:
            use(rank, handle.result(), width)
        else:
            handle.synchronize()
            assert handle.is_completed()


# -- into the caller's memory -----------------------------------------------------------


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_raw(rank: Rank, quiet: Quiet) -> None:
    """A receive into device memory comes after what its poster's stream still reads there.

    The receive is posted to the device by another task, on another stream.
    """
    comm, arena = quiet.connect(rank), rank.arena
    if rank.index == 0:
        comm.isend(arena.full(7, NBYTES), 1)
        return
    with rank.device.stream("readers"):
        target = arena.full(1, NBYTES)
        use(rank, target, 1)
        handle = comm.irecv(target, 0)
    other = rank.spawn(handle.wait, "other waiter")
    other.join()
    with rank.device.stream("users") as users:
        assert handle.result() is target
        use(rank, target, 7)
        users.synchronize()


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_strided(rank: Rank, quiet: Quiet) -> None:
    """A receive into every other element of a device tensor."""
    comm, arena = quiet.connect(rank), rank.arena
    if rank.index == 0:
        comm.isend(arena.full(7, NBYTES), 1)
        return
    whole = arena.full(1, 2 * NBYTES)
    comm.recv(whole[::2], 0)

    def check(data: torch.Tensor) -> None:
        assert data.tolist() == [7, 1] * NBYTES, data.tolist()

    rank.device.launch("use", check, reads=[whole])


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_refused(rank: Rank, quiet: Quiet) -> None:
    """Messages that do not fit their receive fail it alone.

    Those of another kind are lost, and their device payload is discarded; those that are
    too large for the caller's memory, or elsewhere, are left to the next receive.
    """
    comm, arena = quiet.connect(rank), rank.arena
    if rank.index == 0:
        comm.isend_object([arena.full(1, NBYTES)], 1)
        comm.isend_tensor_dict({"x": arena.full(2, NBYTES)}, 1)
        comm.isend_object([arena.full(3, NBYTES)], 1)
        for value in (4, 5):
            comm.isend(arena.full(value, NBYTES), 1)
        return
    handles: list[Any] = [comm.irecv_tensor_dict(0), comm.irecv_object(0)]
    handles += [comm.irecv(arena.empty(8), 0), comm.irecv(blank(NBYTES), 0)]
    for handle in handles:
        error = error_of(handle)
        assert error.kind is ErrorKind.PROTOCOL, error
    use(rank, comm.recv_object(0)[0], 3)
    use(rank, comm.recv(None, 0), 4)
    use(rank, comm.recv(None, 0), 5)


# -- streams, lanes, channels --------------------------------------------------------------


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_two_waiters(rank: Rank, quiet: Quiet) -> None:
    """Two tasks wait for one receive on two streams, then the result is dropped."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        comm.isend(rank.arena.full(5, NBYTES), 1)
        return
    handles = [comm.irecv(None, 0)]

    def consumer() -> None:
        with rank.device.stream("consumer"):
            use(rank, handles[0].result(), 5)

    tasks = [rank.spawn(consumer, f"consumer {n}") for n in range(2)]
    for task in tasks:
        task.join()
    handles.clear()
    churn(rank)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_waited_late(rank: Rank, quiet: Quiet) -> None:
    """A stream that waits for a receive that is long complete still keeps its memory."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        comm.isend(rank.arena.full(5, NBYTES), 1)
        return
    handle = comm.irecv(None, 0)
    handle.synchronize()
    with rank.device.stream("consumer"):
        use(rank, handle.result(), 5)
    del handle
    churn(rank)


@scenario(*DEVICE)
@on_ranks(2, partial(Quiet, inline_bytes=0))
def core_device_overwrite(rank: Rank, quiet: Quiet) -> None:
    """After `wait`, work of the same stream and the host may overwrite the source."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        source, host = rank.arena.full(1, NBYTES), filled(1, 40)
        comm.isend_tensor_dict({"x": source, "host": host}, 1).wait()
        overwrite(rank, source)
        host.fill_(9)
        return
    got = comm.recv_tensor_dict(0)
    use(rank, got["x"], 1)
    assert got["host"].tolist() == [1] * 40


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_lanes(rank: Rank, quiet: Quiet) -> None:
    """Two tags and two channels, received in the opposite order to that of the sends."""
    lanes = [(0, "data", 0), (1, "data", 1), (2, "fold", 0)]
    comm = quiet.connect(rank)
    if rank.index == 0:
        for value, channel, tag in lanes:
            comm.channel(channel).isend(rank.arena.full(value, NBYTES), 1, tag)
        return
    for value, channel, tag in reversed(lanes):
        use(rank, comm.channel(channel).recv(None, 0, tag), value)


@scenario("one_creation")
@on_ranks(2, Quiet)
def core_device_crossed_creation(rank: Rank, quiet: Quiet) -> None:
    """The ranks use two new lanes in opposite orders, where a process makes one at a time."""
    comm, peer = quiet.connect(rank), 1 - rank.index
    for tag in (1, 2) if rank.index == 0 else (2, 1):
        comm.isend(rank.arena.full(10 * rank.index + tag, NBYTES), peer, tag)
    for tag in (1, 2):
        use(rank, comm.recv(None, peer, tag), 10 * peer + tag)


@scenario("one_creation")
@on_ranks(3, Quiet)
def core_device_store(rank: Rank, quiet: Quiet) -> None:
    """Rank 1 sends to rank 0, which does nothing before it hears that rank 2 has its message."""
    comm = quiet.connect(rank)
    if rank.index == 1:
        comm.isend(rank.arena.full(1, NBYTES), 0)
        comm.isend(rank.arena.full(2, NBYTES), 2)
    elif rank.index == 2:
        use(rank, comm.recv(None, 1), 2)
        comm.send_object("go", 0)
    else:
        assert comm.recv_object(2) == "go"
        use(rank, comm.recv(None, 1), 1)


@scenario("pooled")
@on_ranks(2, Quiet)
def core_device_pool(rank: Rank, quiet: Quiet) -> None:
    """A message that is received late holds up no other lane, though streams come from a pool."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        for tag in (1, 2):
            comm.isend(rank.arena.full(tag, NBYTES), 1, tag)
        return
    use(rank, comm.recv(None, 0, 2), 2)
    rank.device.current_stream().synchronize()
    use(rank, comm.recv(None, 0, 1), 1)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_two_claimers(rank: Rank, quiet: Quiet) -> None:
    """Two tasks receive from one lane: each gets the payload that belongs to its header."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        for value in (1, 2):
            comm.isend_tensor_dict({"x": rank.arena.full(value, NBYTES), "n": value}, 1)
        return

    def claimer() -> None:
        got = comm.recv_tensor_dict(0)
        use(rank, got["x"], got["n"])

    for task in [rank.spawn(claimer, f"claimer {n}") for n in range(2)]:
        task.join()


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_two_senders(rank: Rank, quiet: Quiet) -> None:
    """Two tasks of each rank send and receive at once, each on its own tag and stream."""
    comm, peer = quiet.connect(rank), 1 - rank.index

    def speaker(tag: int) -> None:
        with rank.device.stream("speaker"):
            comm.isend(rank.arena.full(10 * rank.index + tag, NBYTES), peer, tag)
            use(rank, comm.recv(None, peer, tag), 10 * peer + tag)

    for task in [rank.spawn(partial(speaker, tag), f"speaker {tag}") for tag in (1, 2)]:
        task.join()


# -- time ------------------------------------------------------------------------------------


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_posts_unmatched(rank: Rank, quiet: Quiet) -> None:
    """Nothing is received before all sends are posted: no post waits for the peer."""
    comm = quiet.connect(rank)
    control = comm.channel("control")
    if rank.index == 0:
        for value in range(3):
            comm.isend_tensor_dict({"x": rank.arena.full(value, NBYTES)}, 1)
        control.send_object("go", 1)
        return
    assert control.recv_object(0) == "go"
    for value in range(3):
        use(rank, comm.recv_tensor_dict(0)["x"], value)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_completes_unwaited(rank: Rank, quiet: Quiet) -> None:
    """`is_completed` turns true though nobody waits; a receive moves inside the call itself."""
    comm = quiet.connect(rank)
    sends = rank.index == 0
    handle: Handle = comm.isend(rank.arena.full(5, NBYTES), 1) if sends else comm.irecv(None, 0)
    while not handle.is_completed():
        rank.sleep(0.1)
    if not sends:
        use(rank, handle.result(0), 5)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_timeout(rank: Rank, quiet: Quiet) -> None:
    """A wait whose limit expires changes nothing."""
    comm = quiet.connect(rank)
    if rank.index == 0:
        rank.sleep(5.0)
        comm.isend(rank.arena.full(4, NBYTES), 1)
        return
    handle = comm.irecv(None, 0)
    for limit in (0.0, 1.0):
        try:
            handle.wait(limit)
        except CommTimeout:
            pass
        else:
            raise AssertionError("the wait of a message that was not sent returned")
    use(rank, handle.result(), 4)


@scenario(*DEVICE)
@on_ranks(2, partial(Quiet, max_inflight_ops=1))
def core_device_bound(rank: Rank, quiet: Quiet) -> None:
    """At the bound of one send in flight the next waits for room, and gets it."""
    comm = quiet.connect(rank)
    for value in range(2):
        if rank.index == 0:
            comm.isend(rank.arena.full(value, NBYTES), 1)
        else:
            use(rank, comm.recv(None, 0), value)


# -- endings -----------------------------------------------------------------------------------


@scenario(*DEVICE)
def core_device_close(world: World) -> None:
    """Both ranks exchange and close at once, and no limit expires.

    A close does not wait for receives: it discards what it has not taken yet, and
    the peer's close names what it then cannot send.  One message arrives: a rank
    parts when its own has left.
    """
    quiet = Quiet(world)
    received: list[int] = []
    named: list[int] = []

    def body(rank: Rank) -> None:
        comm, peer = quiet.connect(rank), 1 - rank.index
        send = comm.isend(rank.arena.full(rank.index, NBYTES), peer)
        receive = comm.irecv(None, peer)
        ending = ""
        try:
            comm.close(timeout=60.0)
        except CommError as error:
            ending = str(error)
        assert rank.runtime.now() < 1.0, "close waited for its limit"
        assert bool(ending) == (send.exception() is not None), f"the close says {ending!r}"
        if ending:
            assert f"the oldest is isend to rank {peer}" in ending, ending
            named.append(rank.index)
        if receive.exception() is None:
            use(rank, receive.result(0), peer)
            received.append(peer)

    def check() -> None:
        assert not set(received) & set(named), f"{received} received, {named} named"
        assert received, "both messages are lost"

    world.at_end(check)
    world.start(2, body)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_close_unclaimed(rank: Rank, quiet: Quiet) -> None:
    """Two messages that nobody asks for behind one that is received: both ends close in time."""
    comm, peer = quiet.connect(rank), 1 - rank.index
    if rank.index == 1:
        use(rank, comm.recv_tensor_dict(peer)["x"], 1)  # from here on the lane receives ahead
        comm.channel("control").recv_object(peer)
        comm.close(timeout=60.0)
        assert rank.runtime.now() < 1.0, "close waited for its limit"
        return
    handles = [comm.isend_tensor_dict({"x": rank.arena.full(1, NBYTES)}, peer) for _ in "abc"]
    comm.channel("control").send_object("posted", peer)
    try:
        comm.close(timeout=20.0)
    except CommError as error:
        if error.kind is not ErrorKind.CLOSED:
            raise
    assert rank.runtime.now() < 1.0, "close waited for its limit"
    assert all(handle.is_completed() for handle in handles)


@scenario("hccl", "nccl")
@on_ranks(2)
def core_device_peer_lost(rank: Rank) -> None:
    """The peer dies somewhere between header and device payload: every handle ends."""
    comm, peer = connect_device(rank, GLOO), 1 - rank.index
    if rank.index == 0:
        comm.isend_tensor_dict({"x": rank.arena.full(1, NBYTES)}, peer)
        rank.world.network(GLOO).kill(0)
        rank.world.network().kill(0)
        return
    errors = []
    for _ in range(2):
        try:
            comm.irecv_tensor_dict(peer).synchronize(timeout=100.0)
        except CommError as error:
            errors.append(error.kind)
    assert errors[-1:] == [ErrorKind.PEER_LOST], errors
    assert set(errors) == {ErrorKind.PEER_LOST}, errors


@scenario("hccl", "nccl")
@on_ranks(2)
def core_device_peer_lost_unposted(rank: Rank) -> None:
    """The peer dies while its header waits for a call of the receiver."""
    comm, peer = connect_device(rank, GLOO), 1 - rank.index
    if rank.index == 0:
        comm.isend_tensor_dict({"x": rank.arena.full(1, NBYTES)}, peer)
        rank.sleep(1.0)
        rank.world.network(GLOO).kill(0)
        rank.world.network().kill(0)
        return
    handle = comm.irecv_tensor_dict(peer)
    rank.sleep(5.0)
    assert error_of(handle).kind is ErrorKind.PEER_LOST


# -- the virtual pipeline --------------------------------------------------------------------------


def _stage(rank: Rank, comm: Communicator, topology: Topology, v: int, batch: int) -> None:
    """Run one stage: receive, compute on the device, and send without a wait."""
    chunk = topology.chunk(v, rank.index)
    source, target = topology.receives(rank.index, v), topology.sends(rank.index, v)
    if source is not None:
        got = comm.channel(source.channel).recv_tensor_dict(source.rank)
        assert got["batch"] == batch, f"batch {got['batch']} in place of {batch}"
        use(rank, got["hidden"], 16 * batch + chunk)
    if target is not None:
        hidden = rank.arena.full(16 * batch + chunk + 1, NBYTES)
        content = {"hidden": hidden, "batch": batch}
        comm.channel(target.channel).isend_tensor_dict(content, target.rank)


def _pipeline(rank: Rank, quiet: Quiet) -> None:
    comm = quiet.connect(rank)
    topology = FoldedTopology(comm.world_size)
    for call in topology.calls(rank.index):
        for batch in range(2):
            for v in call:
                _stage(rank, comm, topology, v, batch)


@scenario(*DEVICE)
@on_ranks(2, Quiet)
def core_device_virtual_pipeline(rank: Rank, quiet: Quiet) -> None:
    """Two ranks, two virtual stages each: first calls of both batches, then continuations."""
    _pipeline(rank, quiet)


@scenario(*DEVICE)
@on_ranks(3, Quiet)
def core_device_virtual_pipeline_of_three(rank: Rank, quiet: Quiet) -> None:
    """Three ranks: the middle one sends and receives on every channel and in every direction."""
    _pipeline(rank, quiet)
