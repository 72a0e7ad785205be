"""A broadcast of a declared size on the simulated device: received ahead of its header."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from commlayer_testkit.sim import Scenario, World, explore
from commlayer_testkit.sim.mount_core import connect_device
from commlayer_testkit.sim.profiles import GLOO
from commlayer_testkit.sim.rank import Rank
from commlayer_testkit.sim.scenarios.device_core import DEVICE, STREAM, Quiet, churn, error_of, use

from commlayer.communicator import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast

SOURCE = 0
AT_MOST = 32
Strategy = Literal["random", "pct"]

every_transport = pytest.mark.parametrize("on", DEVICE)
every_stream_transport = pytest.mark.parametrize("on", STREAM)
by_chance = pytest.mark.parametrize("strategy", ["random", "pct"])


def explored(
    body: Callable[[Rank, Communicator], object], on: str, strategy: Strategy, **config: str
) -> None:
    """`body` on two ranks, in schedules by chance; nothing is left behind in any."""

    def setup(world: World) -> None:
        quiet = Quiet(world, **config)
        world.start(2, lambda rank: body(rank, quiet.connect(rank)))

    report = explore(
        Scenario("declared", setup, None, DEVICE),
        on=on, strategy=strategy, budget=20, verify_every=0, shrink=False,
    )  # fmt: skip
    assert report.failure is None, str(report)


def tokens_of(rank: Rank, value: int, *shape: int) -> torch.Tensor | None:
    return rank.arena.full(value, *shape) if rank.index == SOURCE else None


def receiving(rank: Rank) -> bool:
    """Whether a receive of the declared size is with the transport."""
    return bool(rank.endpoint("commlayer/sim_device/broadcast/broadcast.reserved/up/0-1").pending())


def until_receiving(rank: Rank) -> None:
    """Where a task of the lane posts, it may take a moment."""
    rank.world.block(lambda: receiving(rank), "waits for a receive to be posted", "its lane")


def close(comm: Communicator) -> None:
    """Close; the limit does not expire, as the virtual time shows."""
    now = comm._connection.runtime.now
    begun = now()
    comm.close(50.0)
    assert now() - begun < 25.0


def posted_then_sent(
    rank: Rank, comm: Communicator, tokens: DeferredBroadcast, step: int, *, ahead: bool
) -> None:
    """Post `step` on the source after the other rank has, which receives `ahead` or does not."""
    if rank.index == SOURCE:
        assert comm.recv_object(1) == "posted"
        tokens.post(step, rank.arena.full(step, 5))
        churn(rank)
        return
    tokens.post(step)
    if ahead:
        until_receiving(rank)
    independent = rank.arena.full(9, 8)
    use(rank, independent, 9)
    rank.device.current_stream().synchronize()
    assert receiving(rank) is ahead
    comm.send_object("posted", SOURCE)


@every_stream_transport
@by_chance
def test_it_is_received_ahead_from_the_second_step_on(on: str, strategy: Strategy) -> None:
    """Kernels that need no tokens run while the receive is posted and nothing was sent."""

    def body(rank: Rank, comm: Communicator) -> None:
        tokens = DeferredBroadcast(comm, SOURCE, at_most=AT_MOST)
        assert tokens.overlaps
        for step in range(3):
            posted_then_sent(rank, comm, tokens, step, ahead=step > 0)
            got = tokens.take(100.0)
            assert got.shape == (5,)
            use(rank, got, step)
            del got
            rank.device.current_stream().synchronize()
        tokens.close()
        close(comm)

    explored(body, on, strategy)


def test_without_a_size_nothing_is_received_before_take() -> None:
    def body(rank: Rank, comm: Communicator) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)
        assert not tokens.overlaps
        for step in range(2):
            posted_then_sent(rank, comm, tokens, step, ahead=False)
            use(rank, tokens.take(100.0), step)
            rank.device.current_stream().synchronize()

    explored(body, "nccl", "random")


@every_transport
@by_chance
def test_widths_change_and_steps_are_skipped(on: str, strategy: Strategy) -> None:
    """Up to the declared size, nothing at all, another dtype; sources are dropped at once."""

    def body(rank: Rank, comm: Communicator) -> None:
        tokens = DeferredBroadcast(comm, SOURCE, at_most=AT_MOST)
        for step, shape in enumerate([(3,), (2, 5), (0, 4), (AT_MOST,), None, (1,)]):
            if shape is None:
                tokens.skip(step)
                assert tokens.take(skipped="none") == "none"
                continue
            tokens.post(step, tokens_of(rank, step, *shape))
            churn(rank)
            got = tokens.take(100.0)
            assert tuple(got.shape) == shape
            if got.numel():
                use(rank, got.view(-1), step)
            del got
        sent = tokens_of(rank, 0, 8)
        tokens.post(6, None if sent is None else sent.view(torch.int32))
        del sent
        assert tokens.take(100.0).dtype is torch.int32
        close(comm)

    explored(body, on, strategy)


@pytest.mark.parametrize("retention", ["hold_references", "hold_until_event"])
def test_every_retention(retention: str) -> None:
    def body(rank: Rank, comm: Communicator) -> None:
        for value, size in enumerate([3, AT_MOST, 5]):
            handle = comm.broadcast(tokens_of(rank, value, size), SOURCE, True, at_most=AT_MOST)
            churn(rank)
            use(rank, handle.result(), value)
            del handle
        close(comm)

    explored(body, "nccl", "random", retention=retention)


@every_stream_transport
def test_several_at_once_and_into_memory(on: str) -> None:
    """One is received ahead, the others behind it; results are those of their own message."""

    def body(rank: Rank, comm: Communicator) -> None:
        for turn in (0, 3):
            targets = [
                rank.arena.empty(6) if rank.index != SOURCE else rank.arena.full(turn + n, 6)
                for n in range(2)
            ]
            given = [*targets, tokens_of(rank, turn + 2, 7)]
            handles = [comm.broadcast(each, SOURCE, True, at_most=AT_MOST) for each in given]
            del given
            for n, handle in enumerate(handles):
                got = handle.result()
                assert n == 2 or got is targets[n]
                use(rank, got, turn + n)
                del got
        close(comm)

    explored(body, on, "random")


@every_stream_transport
@by_chance
def test_what_does_not_fit_is_refused_at_the_source(on: str, strategy: Strategy) -> None:
    def body(rank: Rank, comm: Communicator) -> None:
        def send(tensor: torch.Tensor | None, at_most: int = AT_MOST) -> torch.Tensor:
            return comm.broadcast(tensor, SOURCE, at_most=at_most)  # type: ignore[no-any-return]

        use(rank, send(tokens_of(rank, 1, 4)), 1)
        if rank.index == SOURCE:
            for tensor, words in (
                (rank.arena.full(2, AT_MOST + 1), "has 33 bytes, at_most = 32"),
                (torch.zeros(4), "on the device, this is on cpu"),
            ):
                with pytest.raises(CommError, match=words) as caught:
                    send(tensor)
                assert caught.value.kind is ErrorKind.CONFIG
            del tensor
        with pytest.raises(CommError, match="at_most = 16 differs from the 32") as caught:
            send(tokens_of(rank, 3, 4), 16)
        assert caught.value.kind is ErrorKind.CONFIG
        use(rank, send(tokens_of(rank, 4, 4)), 4)
        close(comm)

    explored(body, on, strategy)


@every_stream_transport
@by_chance
def test_ranks_that_declare_otherwise_fail_that_broadcast(on: str, strategy: Strategy) -> None:
    """Sizes are compared before anything is received ahead; both values are named."""

    def body(rank: Rank, comm: Communicator) -> None:
        mine = AT_MOST if rank.index == SOURCE else 16
        for value in range(2):
            handle = comm.broadcast(tokens_of(rank, value, 4), SOURCE, True, at_most=mine)
            if rank.index == SOURCE:
                handle.wait()
                continue
            error = error_of(handle)
            assert error.kind is ErrorKind.PROTOCOL
            assert "the peer declared at_most = 32, this rank at_most = 16" in str(error)
        use(rank, comm.broadcast(tokens_of(rank, 7, 4), SOURCE), 7)
        close(comm)

    explored(body, on, strategy)


@every_stream_transport
@by_chance
def test_a_message_without_a_size_leaves_the_receive_to_the_next(
    on: str, strategy: Strategy
) -> None:
    def body(rank: Rank, comm: Communicator) -> None:
        use(rank, comm.broadcast(tokens_of(rank, 1, 4), SOURCE, at_most=AT_MOST), 1)
        if rank.index == SOURCE:
            comm.broadcast(rank.arena.full(2, 4), SOURCE)
            assert comm.recv_object(1) == "refused"
        else:
            error = error_of(comm.broadcast(None, SOURCE, True, at_most=AT_MOST))
            assert error.kind is ErrorKind.PROTOCOL
            assert "the peer declared no size, this rank at_most = 32" in str(error)
            until_receiving(rank)
            comm.send_object("refused", SOURCE)
        use(rank, comm.broadcast(tokens_of(rank, 3, 4), SOURCE, at_most=AT_MOST), 3)
        close(comm)

    explored(body, on, strategy)


@every_stream_transport
@by_chance
@pytest.mark.parametrize("first", [0, 1])
def test_closing_ends_a_receive_that_is_posted_ahead(
    on: str, strategy: Strategy, first: int
) -> None:
    """Whichever rank closes first; with a message that nobody takes, or with none."""

    def body(rank: Rank, comm: Communicator) -> None:
        tokens = DeferredBroadcast(comm, SOURCE, at_most=AT_MOST)
        tokens.post(0, tokens_of(rank, 0, 4))
        use(rank, tokens.take(100.0), 0)
        if rank.index != SOURCE:
            tokens.post(1)
            until_receiving(rank)
            with pytest.raises(CommTimeout, match="rank 0 has not posted it"):
                tokens.take(1.0)
            assert tokens.close() == 1
            comm.send_object("posted", SOURCE)
        else:
            assert comm.recv_object(1) == "posted"
        if rank.index != first:
            rank.sleep(5.0)
        close(comm)
        assert not receiving(rank)

    explored(body, on, strategy)


@every_stream_transport
@by_chance
def test_closing_ends_one_that_was_sent_and_not_taken(on: str, strategy: Strategy) -> None:
    """It is received, and its source let go of, without a call of the receiver."""
    drained: set[World] = set()

    def body(rank: Rank, comm: Communicator) -> None:
        tokens = DeferredBroadcast(comm, SOURCE, at_most=AT_MOST)
        for step in range(2):
            tokens.post(step, tokens_of(rank, step, 4))
            if step == 0:
                use(rank, tokens.take(100.0), 0)
        assert tokens.close() == 1
        if rank.index == SOURCE:
            comm.drain(100.0)
            drained.add(rank.world)
        else:
            rank.world.block(lambda: rank.world in drained, "waits for the source", "the source")
        close(comm)
        assert not receiving(rank)

    explored(body, on, strategy)


@pytest.mark.parametrize("on", ["hccl", "nccl"])
@by_chance
def test_a_peer_that_dies_ends_a_receive_that_is_posted_ahead(on: str, strategy: Strategy) -> None:
    def body(rank: Rank) -> None:
        comm = connect_device(rank, GLOO)
        tokens = DeferredBroadcast(comm, SOURCE, at_most=AT_MOST)
        tokens.post(0, tokens_of(rank, 0, 4))
        use(rank, tokens.take(100.0), 0)
        if rank.index == SOURCE:
            assert comm.recv_object(1) == "posted"
            rank.world.network(GLOO).kill(0)
            rank.world.network().kill(0)
            return
        tokens.post(1)
        until_receiving(rank)
        comm.isend_object("posted", SOURCE)
        with pytest.raises(CommError, match="tokens of step 1 from rank 0") as caught:
            tokens.take(100.0)
        assert caught.value.kind is ErrorKind.PEER_LOST

    report = explore(
        Scenario("declared", lambda world: world.start(2, body), None, DEVICE),
        on=on, strategy=strategy, budget=20, verify_every=0, shrink=False,
    )  # fmt: skip
    assert report.failure is None, str(report)
