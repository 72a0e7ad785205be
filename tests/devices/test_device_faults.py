"""What once went wrong with torch's own NCCL groups under the library, each kind once.

Simulated devices had shown none of it: it takes torch's pool of streams, its store
client, its allocator and its watchdog.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from devices.groups import QUIET, group, until
from devices.pair import connect, needs_stand_in, swap
from devices.tensors import full, take_device, value
from ranks import here
from ranks.pool import Ranks, collect
from standin import controls

import commlayer
from commlayer.errors import CommError, ErrorKind
from commlayer.handle import Handle


def error_of(call: Callable[[], object]) -> CommError | None:
    """The CommError that `call` raises, if it raises one; anything else passes through."""
    try:
        call()
    except CommError as error:
        return error
    return None


def settled(handle: Handle[object], limit: float = 30) -> CommError | None:
    """How a handle ends, by polling alone; fails if it does not."""
    assert until(handle.is_completed, limit), f"{handle!r} does not end"
    return handle.exception()


# -- lanes and the streams that torch has ------------------------------------------------

MANY = 20
"""Tags: their lanes are more than half of the streams in torch's pool."""


def one_tag_is_not_received() -> tuple[list[int], list[str]]:
    comm = connect()
    peer = 1 - comm.rank
    refused, sent, held_up = [], [], []
    for tag in range(MANY):
        error = error_of(lambda tag=tag: swap(comm, tag))  # type: ignore[misc]
        if error is not None:
            refused.append(str(error))
            break
        sent.append(tag)
    here.meet("lanes are there")
    if comm.rank == 0:
        stuck = comm.isend(full(1), peer, 0)
    for tag in sent[1:]:
        sends = comm.isend(full(tag), peer, tag)
        receives = comm.irecv(None, peer, tag)
        if not (until(receives.is_completed, 10) and until(sends.is_completed, 10)):
            held_up.append(tag)
    here.meet("looked")
    if comm.rank == 0:
        error = error_of(lambda: stuck.synchronize(20))
    else:
        error = error_of(lambda: comm.irecv(None, peer, 0).synchronize(20))
    if error is not None:
        held_up.append(0)
    error_of(comm.close)
    return held_up, refused


def test_a_message_that_nobody_receives_holds_up_no_other_tag(ranks: Ranks) -> None:
    for held_up, refused in ranks.run(one_tag_is_not_received, 2, timeout=110):
        assert not held_up
        assert all("max_device_lanes" in text for text in refused), refused


def the_application_has_streams() -> int:
    comm = connect()
    peer = 1 - comm.rank
    for tag in range(8):
        swap(comm, tag)
    here.meet("lanes are there")
    stuck = [comm.isend(full(1), peer, tag) for tag in range(8)] if comm.rank == 0 else []
    streams = [torch.cuda.Stream() for _ in range(32)]
    done = []
    for stream in streams:
        with stream:
            full(1)
            event = torch.Event(torch.device("cuda", comm.rank))
            event.record(stream)
            done.append(event)
    until(lambda: all(event.query() for event in done), 3)
    waiting = sum(not event.query() for event in done)
    here.meet("looked")
    for tag in range(8):
        if comm.rank == 1:
            comm.recv(None, peer, tag)
    for handle in stuck:
        handle.synchronize(20)
    comm.close()
    return waiting


def test_messages_that_nobody_receives_hold_up_few_streams_of_the_application(
    ranks: Ranks,
) -> None:
    """Each group has one of torch's pooled streams, which is torch's doing; no lane has another."""
    waiting = ranks.run(the_application_has_streams, 2, timeout=60)[0]
    assert waiting <= 8


# -- the first message and the store -----------------------------------------------------


def the_receiver_is_busy() -> int:
    comm = connect(connect_timeout=5.0)
    if comm.rank == 1:
        handle = comm.isend(full(7), 0, tag=5)
        handle.synchronize(60)
        seen = 7
    else:
        time.sleep(11)  # loads a model: twice the connect timeout
        seen = value(comm.recv(None, 1, tag=5))
    comm.close()
    return seen


def test_a_peer_that_is_busy_for_longer_than_the_connect_timeout_is_not_lost(
    ranks: Ranks,
) -> None:
    assert ranks.run(the_receiver_is_busy, 2, timeout=60) == [7, 7]


def a_group_is_made_meanwhile() -> int:
    take_device()
    dist.init_process_group("gloo")
    comm = commlayer.connect({"backend": "nccl", "connect_timeout": 50.0})
    if comm.rank == 1:
        handle = comm.isend(full(7), 0, tag=5)
        dist.new_group()
        handle.synchronize(30)
        seen = 7
    else:
        dist.new_group()
        seen = value(comm.recv(None, 1, tag=5))
    comm.close()
    dist.destroy_process_group()
    return seen


def test_a_first_message_under_way_does_not_keep_torch_from_making_groups(ranks: Ranks) -> None:
    assert ranks.run(a_group_is_made_meanwhile, 2, timeout=40) == [7, 7]


def in_opposite_orders() -> list[int]:
    comm = connect()
    peer = 1 - comm.rank
    order = (1, 2) if comm.rank == 0 else (2, 1)
    sent = []
    for tag in order:
        sent.append(comm.isend(full(10 * tag), peer, tag))
        time.sleep(0.5)  # so that each communicator is begun before the next
    seen = [value(comm.recv(None, peer, tag)) for tag in (1, 2)]
    for handle in sent:
        handle.synchronize(20)
    comm.close()
    return seen


@needs_stand_in
def test_ranks_that_use_lanes_in_opposite_orders_do_not_wait_for_each_other(ranks: Ranks) -> None:
    """With a library that makes one communicator at a time in each process."""
    environment = {"STANDIN_ONE_INIT_AT_A_TIME": "1"}
    assert ranks.run(in_opposite_orders, 2, timeout=45, environment=environment) == [[10, 20]] * 2


def communicators_made() -> tuple[int, int]:
    comm = connect()
    peer = 1 - comm.rank
    at_connect = controls.counters()["ncclCommInitRank"]
    sent = comm.isend_tensor_dict({"x": full(1)}, peer)
    comm.recv_tensor_dict(peer)
    sent.synchronize()
    comm.broadcast(full(2) if comm.rank == 0 else None, 0)
    later = controls.counters()["ncclCommInitRank"] - at_connect
    comm.close()
    return at_connect, later


@needs_stand_in
def test_the_lanes_of_dicts_and_broadcasts_are_connected_by_connect(ranks: Ranks) -> None:
    for at_connect, later in ranks.run(communicators_made, 2, timeout=60):
        assert at_connect > 0
        assert later == 0


# -- memory ------------------------------------------------------------------------------


def tracked_and_dropped() -> int:
    comm = connect()
    pg = group()
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = True
    pg.broadcast([full(0)], options).wait()  # the first makes the communicator
    torch.cuda.synchronize()
    if comm.rank == 0:
        tensor = full(7)
        handle = comm.track(pg.broadcast([tensor], options))
        del tensor
        again = [full(9) for _ in range(4)]
        torch.cuda.current_stream().synchronize()
        here.meet("allocated again")
        handle.synchronize(30)
        del again
        seen = 7
    else:
        here.meet("allocated again")
        into = full(0)
        pg.broadcast([into], options).wait()
        seen = value(into)
    torch.cuda.synchronize()
    pg.shutdown()
    comm.close()
    return seen


def test_work_that_is_tracked_sends_what_was_there_though_its_tensor_is_dropped(
    ranks: Ranks,
) -> None:
    assert ranks.run(tracked_and_dropped, 2, timeout=60) == [7, 7]


def nothing_to_send() -> tuple[str, tuple[int, ...]]:
    comm = connect()
    peer = 1 - comm.rank
    device = torch.device("cuda", comm.rank)
    sent = comm.isend_tensor_dict({"x": torch.empty((0, 4096), device=device)}, peer)
    got = comm.recv_tensor_dict(peer)["x"]
    sent.synchronize()
    comm.close()
    return got.device.type, tuple(got.shape)


def test_an_empty_device_tensor_arrives_on_the_device(ranks: Ranks) -> None:
    assert ranks.run(nothing_to_send, 2, timeout=60) == [("cuda", (0, 4096))] * 2


def recorded_on_the_stream() -> tuple[str, int]:
    try:
        comm = connect(retention="record_stream")
    except CommError as error:
        return error.kind.value, 0
    swap(comm)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    if comm.rank == 0:
        handle = comm.isend(full(7, 8 << 20), 1)
        kept = torch.cuda.memory_allocated() - before
        here.meet("looked")
        handle.synchronize(20)
    else:
        here.meet("looked")
        comm.recv(None, 0)
        kept = 0
    comm.close()
    return "", kept


def test_record_stream_gives_memory_back_to_the_allocator_at_the_post_or_is_no_policy(
    ranks: Ranks,
) -> None:
    for refused, kept in ranks.run(recorded_on_the_stream, 2, timeout=60):
        assert refused in ("", ErrorKind.CONFIG.value)
        assert kept == 0


# -- the device and the host's threads ------------------------------------------------------


def a_rank_with_the_second_device() -> dict[int, str]:
    comm = connect()
    peer = 1 - comm.rank
    for tag in range(3):
        swap(comm, tag)
    comm.isend_tensor_dict({"x": full(1), "y": full(2)}, peer)
    comm.recv_tensor_dict(peer)
    comm.irecv(full(0), peer, 1).wait() if comm.rank else comm.isend(full(1), peer, 1).synchronize()
    event = torch.Event(torch.device("cuda", comm.rank))
    event.record()
    comm.track(event, retain=[full(3)]).synchronize(20)
    comm.drain(20)
    comm.close()
    return controls.contexts()


@needs_stand_in
def test_each_rank_has_a_context_on_its_own_device_only(ranks: Ranks) -> None:
    contexts = ranks.run(a_rank_with_the_second_device, 2, timeout=60)
    assert [sorted(each) for each in contexts] == [[0], [1]], contexts


def posts_far_ahead() -> int:
    comm = connect()
    peer = 1 - comm.rank
    swap(comm)
    if comm.rank == 0:
        tensor = full(1, 64 << 10)
        handles = [comm.isend(tensor, peer) for _ in range(600)]
        here.meet("sent")
        for handle in handles:
            handle.synchronize(60)
        seen = 600
    else:
        here.meet("sent")
        seen = sum(value(comm.recv(None, peer)) for _ in range(600))
    comm.close()
    return seen


@needs_stand_in
def test_posting_far_ahead_does_not_fill_the_driver_s_queue(ranks: Ranks) -> None:
    """A full queue blocks the host inside torch, which keeps the interpreter's lock."""
    assert ranks.run(posts_far_ahead, 2, timeout=90) == [600, 600]


def bounds_of_communicators() -> list[str]:
    comm = connect()
    swap(comm)
    comm.close()
    return [name for name in controls.counters() if name.startswith("communicator of at most")]


@needs_stand_in
def test_communicators_take_few_multiprocessors(ranks: Ranks) -> None:
    for bounds in ranks.run(bounds_of_communicators, 2, timeout=60):
        assert bounds
        assert all(int(text.split()[4]) <= 8 for text in bounds), bounds


# -- blocking waits ------------------------------------------------------------------------


def with_blocking_wait() -> str:
    try:
        comm = connect()
    except CommError as error:
        return str(error)
    peer = 1 - comm.rank
    for _ in range(2):
        handle = comm.isend(full(1), peer)
        here.meet("both have sent")
        comm.recv(None, peer)
        handle.synchronize(20)
    comm.close()
    return ""


@pytest.mark.parametrize("variable", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_a_blocking_wait_by_environment_is_refused_or_holds_nobody_up(
    ranks: Ranks, variable: str
) -> None:
    for refused in ranks.run(with_blocking_wait, 2, timeout=60, environment={variable: "1"}):
        assert refused == "" or variable in refused


# -- errors --------------------------------------------------------------------------------


def the_transport_reports_an_error() -> str:
    comm = connect()
    swap(comm)
    here.meet("connected")
    if comm.rank == 0:
        handle = comm.isend(full(0), 1)  # which nobody receives
        controls.break_communicators()
        error = settled(handle)
        here.meet("looked")
        error_of(lambda: comm.close(5))
        return str(error)
    here.meet("looked")
    error_of(lambda: comm.close(5))
    return ""


@needs_stand_in
def test_a_handle_fails_with_what_the_transport_reports(ranks: Ranks) -> None:
    error = ranks.run(the_transport_reports_an_error, 2, timeout=60, environment=QUIET)[0]
    assert "remote process exited" in error, error


def after_the_watchdog() -> str:
    """Under torch's defaults the watchdog ends a process that does nothing about an error."""
    comm = connect()
    swap(comm)
    here.meet("connected")
    if comm.rank == 0:
        handle = comm.isend(full(0), 1)  # which nobody receives
        controls.break_communicators()
        error = settled(handle)
        time.sleep(3)
        here.meet("looked")
        error_of(lambda: comm.close(5))
        return str(error)
    here.meet("looked")
    error_of(lambda: comm.close(5))
    return ""


@needs_stand_in
def test_an_error_of_the_transport_does_not_end_the_process(ranks: Ranks) -> None:
    environment = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "200"}
    assert ranks.run(after_the_watchdog, 2, timeout=60, environment=environment)[0]


def receives_from_the_dead() -> None:
    comm = connect()
    swap(comm)
    here.say("connected")
    here.hear()  # the peer has sent something, and was stopped
    handle = comm.irecv(None, 1)
    time.sleep(1)  # the receive gets to the device
    here.say("posted")
    here.hear()  # the peer is dead
    error = settled(handle)
    assert error is not None
    idle = Thread(target=_synchronize, daemon=True)
    idle.start()
    idle.join(20)
    if idle.is_alive():
        here.say((error.kind.value, False))
        os._exit(0)  # a device that is stuck would hold up the end of the process, too
    error_of(lambda: comm.close(5))
    here.say((error.kind.value, True))


def _synchronize() -> None:
    torch.cuda.set_device(0)
    torch.cuda.synchronize()


def sends_and_dies() -> None:
    comm = connect()
    swap(comm)
    here.say("connected")
    here.hear()
    handle = comm.isend(full(1, 64 << 20), 0)
    time.sleep(1)  # its header goes out
    here.say("sent")
    here.hear()
    handle.synchronize()


def pair_with_one_to_die() -> None:
    receives_from_the_dead() if here.rank() == 0 else sends_and_dies()


def test_a_dead_peer_s_operations_fail_and_the_device_is_freed(ranks: Ranks) -> None:
    survivor, victim = ranks.spawn(pair_with_one_to_die, 2, environment=QUIET)
    survivor.hear(60)
    victim.hear(60)
    victim.say("send")
    victim.hear(60)
    victim.stop()
    survivor.say("receive")
    survivor.hear(60)
    victim.signal(signal.SIGKILL)
    victim.wait(30)
    survivor.say("dead")
    assert survivor.hear(90) == (ErrorKind.PEER_LOST.value, True)


def a_device_error() -> tuple[str, str]:
    comm = connect()
    peer = 1 - comm.rank
    swap(comm)
    here.meet("swapped")
    if comm.rank == 1:
        here.meet("looked")
        error_of(lambda: comm.close(5))
        return "", ""
    handle = comm.irecv(full(0), peer)
    sent = comm.isend(full(1), peer)
    controls.break_device(0)
    error = settled(sent) or settled(handle)
    here.meet("looked")
    error_of(lambda: comm.close(5))
    assert error is not None
    return error.kind.value, str(error)


@needs_stand_in
def test_an_error_of_the_own_device_is_not_the_peer_s_loss(ranks: Ranks) -> None:
    # The watchdog asks the device, too, and by default ends the process at its error.
    environment = {**QUIET, "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
    kind, text = ranks.run(a_device_error, 2, timeout=60, environment=environment)[0]
    assert kind == "device"
    assert "illegal memory access" in text


def a_post_fails() -> tuple[str, str]:
    comm = connect()
    peer = 1 - comm.rank
    swap(comm)
    here.meet("swapped")
    kind = text = ""
    if comm.rank == 0:
        controls.refuse_posts()
        error: Exception | None
        try:
            error = settled(comm.isend(full(1), peer))
        except Exception as raised:
            error = raised
        kind = "CommError" if isinstance(error, CommError) else type(error).__name__
        text = str(error)
    here.meet("looked")
    error_of(lambda: comm.close(5))
    return kind, text


@needs_stand_in
def test_a_post_that_fails_is_a_commerror_with_what_the_transport_says(ranks: Ranks) -> None:
    kind, text = ranks.run(a_post_fails, 2, timeout=60, environment=QUIET)[0]
    assert kind == "CommError", text
    assert "internal error" in text


# -- close, and torch's own tools ---------------------------------------------------------------


def closes() -> dict[str, int]:
    comm = connect()
    swap(comm)
    comm.close()
    calls = controls.counters()
    return {name: calls[name] for name in ("ncclCommAbort", "ncclCommDestroy")}


@needs_stand_in
def test_a_clean_close_shuts_the_communicators_down_and_aborts_none(ranks: Ranks) -> None:
    processes = ranks.spawn(closes, 2)
    for calls in collect(processes, 60):
        assert calls["ncclCommAbort"] == 0
        assert calls["ncclCommDestroy"] > 0
    for process in processes:
        assert process.wait(60) == 0
        assert "destroy_process_group() was not called" not in process.output


def flight_recorder() -> list[tuple[str, str]]:
    import pickle

    comm = connect()
    for tag in range(2):
        swap(comm, tag)
    trace = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())
    comm.close()
    return sorted({tuple(entry["process_group"]) for entry in trace["entries"]})


def test_torch_s_flight_recorder_names_the_lanes(ranks: Ranks) -> None:
    environment = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "100"}
    for names in ranks.run(flight_recorder, 2, timeout=60, environment=environment):
        assert len(names) >= 2, names
        assert all("commlayer" in f"{name} {description}" for name, description in names), names


def logs_with_names() -> None:
    comm = connect()
    swap(comm)
    comm.close()


def test_torch_s_log_knows_the_size_of_each_group(ranks: Ranks) -> None:
    processes = ranks.spawn(logs_with_names, 2)
    collect(processes, 60)
    for process in processes:
        assert "ProcessGroup with size 0" not in process.output
