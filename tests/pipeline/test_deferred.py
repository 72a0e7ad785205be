"""The life of a deferred broadcast, on two real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import here
from ranks.pool import Ranks

from commlayer import Communicator
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.pipeline.deferred import DeferredBroadcast
from commlayer.pipeline.lazy import LazyTensorDict
from commlayer.pipeline.rows import DeferredRows, RowGenerations

SOURCE, OTHER = 1, 0


def refused(kind: ErrorKind, call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(CommError) as error:
        call()
    assert error.value.kind is kind, error.value
    for word in words:
        assert word in str(error.value), error.value


def run(body: Callable[[Communicator, bool], Any]) -> Any:
    comm = here.connect()
    result = body(comm, comm.rank == SOURCE)
    comm.close()
    return result


def overlap() -> None:
    """Work that needs no tokens runs between post and take, on the source and on the other."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)
        if not source:
            tokens.post(0)
        here.meet("the other rank has posted step 0, the source has not")
        if source:
            tokens.post(0, torch.arange(3))
        here.meet("both have posted step 0")
        if source:
            tokens.take()
            tokens.post(1, torch.arange(1 << 18))
            assert tokens.take().numel() == 1 << 18
        here.meet("the source has posted and taken step 1, the other rank has not posted it")
        if not source:
            assert tokens.take(20).tolist() == [0, 1, 2]
            tokens.post(1)
            assert torch.equal(tokens.take(20), torch.arange(1 << 18))

    run(body)


def test_neither_side_waits_between_post_and_take(ranks: Ranks) -> None:
    ranks.run(overlap, 2)


def widths() -> None:
    """Width and dtype change from step to step, and nothing announces it."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)
        sent = [
            torch.arange(6).reshape(2, 3),
            torch.arange(10, dtype=torch.int32).reshape(2, 5),
            torch.empty(0, 4),
            torch.tensor(7.5, dtype=torch.float16),
        ]
        for step, tensor in enumerate(sent):
            tokens.post(step, tensor if source else None)
            got = tokens.take(20)
            assert got.dtype == tensor.dtype
            assert torch.equal(got, tensor)

    run(body)


def test_width_and_dtype_may_change_per_step(ranks: Ranks) -> None:
    ranks.run(widths, 2)


def declared() -> None:
    """A declared size is a bound on the host: kept by the source, compared by the others."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE, at_most=32)
        assert tokens.overlaps
        for step, tensor in enumerate([torch.arange(3), torch.empty(0, 4), torch.arange(4)]):
            tokens.post(step, tensor if source else None)
            assert torch.equal(tokens.take(20), tensor)
        tokens.skip(3)
        if source:
            refused(
                ErrorKind.CONFIG, lambda: tokens.post(4, torch.arange(5)),
                "the tensor has 40 bytes, at_most = 32",
            )  # fmt: skip
        tokens.post(4, torch.arange(2) if source else None)
        assert tokens.take(20).tolist() == [0, 1]

        plain = DeferredBroadcast(comm, SOURCE, at_most=None if source else 32)
        plain.post(0, torch.arange(2) if source else None)
        if not source:
            refused(
                ErrorKind.PROTOCOL, lambda: plain.take(20),
                "tokens of step 0", "the peer declared no size, this rank at_most = 32",
            )  # fmt: skip
        refused(
            ErrorKind.CONFIG, lambda: comm.broadcast(torch.zeros(1), SOURCE, at_most=64),
            "at_most = 64 differs from the 32",
        )  # fmt: skip
        other = comm.channel("fold")
        handle = other.broadcast(
            torch.zeros(2) if source else None, SOURCE, True, at_most=8 + source
        )
        if not source:
            refused(
                ErrorKind.PROTOCOL, lambda: handle.result(20),
                "the peer declared at_most = 9, this rank at_most = 8",
            )  # fmt: skip
        refused(
            ErrorKind.CONFIG, lambda: comm.broadcast(torch.zeros(1), SOURCE, at_most=0),
            "at_most is a positive number of bytes",
        )  # fmt: skip

    run(body)


def test_a_declared_size_is_a_bound(ranks: Ranks) -> None:
    ranks.run(declared, 2)


def life() -> None:
    """What is not allowed is refused, the same on every rank, and costs nothing else."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)

        def post(deferred: DeferredBroadcast, step: int) -> None:
            deferred.post(step, torch.tensor([step]) if source else None)

        refused(ErrorKind.CONFIG, tokens.take, "nothing was posted yet")
        post(tokens, 0)
        refused(
            ErrorKind.CONFIG, lambda: post(tokens, 1),
            "tokens of step 1 from rank 1", "step 0 was not taken",
        )  # fmt: skip
        refused(ErrorKind.CONFIG, lambda: tokens.skip(1), "step 0 was not taken")
        assert tokens.pending == 0
        assert tokens.take(20).tolist() == [0]
        refused(ErrorKind.CONFIG, tokens.take, "tokens of step 0 from rank 1", "taken already")
        refused(ErrorKind.CONFIG, lambda: post(tokens, 0), "the last step was 0")
        refused(
            ErrorKind.CONFIG,
            lambda: tokens.post(1, None if source else torch.zeros(1)),
            "the source posts a tensor",
        )
        tokens.skip(1)
        refused(ErrorKind.CONFIG, tokens.take, "step 1", "skipped")
        refused(ErrorKind.CONFIG, tokens.take, "taken already")
        tokens.skip(2)
        assert tokens.take(skipped="nothing sampled") == "nothing sampled"
        post(tokens, 5)
        assert tokens.take(20).tolist() == [5]

        drained = DeferredBroadcast(comm, SOURCE, "drafts", on_pending="drain")
        post(drained, 0)
        drained.post(1, torch.tensor([1]) if source else None, timeout=20)
        drained.skip(2, timeout=20)
        post(drained, 3)
        assert drained.take(20).tolist() == [3]

        post(tokens, 6)
        assert tokens.close() == 6
        refused(ErrorKind.CLOSED, lambda: post(tokens, 7))
        refused(ErrorKind.CLOSED, tokens.take)
        assert drained.close() is None
        assert comm.broadcast_object("after" if source else None, SOURCE) == "after"

    run(body)


def test_every_way_to_misuse_it_is_refused(ranks: Ranks) -> None:
    ranks.run(life, 2)


def missing() -> None:
    """A broadcast that does not come: the limit names it and changes nothing."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)
        if source:
            here.meet("the other rank has waited in vain")
            tokens.post(0, torch.tensor([4]))
        else:
            tokens.post(0)
            with pytest.raises(CommTimeout) as error:
                tokens.take(0.01)
            for words in ("tokens of step 0 from rank 1", "rank 1 has not posted", "rank 0"):
                assert words in str(error.value)
            assert tokens.pending == 0
            here.meet("the other rank has waited in vain")
            assert tokens.take(20).tolist() == [4]

    run(body)


def test_a_missing_broadcast_is_named_and_may_come_late(ranks: Ranks) -> None:
    ranks.run(missing, 2)


def disagree() -> None:
    """Both directions of disagreement are reported once, and the ranks find together."""

    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)

        def post(step: int) -> None:
            tokens.post(step, torch.tensor([step]) if source else None)

        def agree(step: int) -> None:
            post(step)
            assert tokens.take(20).tolist() == [step]

        agree(0)
        # The source skips step 1.
        if source:
            tokens.skip(1)
            tokens.take(skipped=None)
            agree(2)
        else:
            post(1)
            refused(
                ErrorKind.PROTOCOL, lambda: tokens.take(20),
                "tokens of step 1 from rank 1", "it is at step 2",
            )  # fmt: skip
            refused(ErrorKind.CONFIG, tokens.take, "taken already")
            agree(2)
        agree(3)
        # The other rank skips step 4.
        if source:
            agree(4)
            agree(5)
        else:
            tokens.skip(4)
            post_and_fail(tokens, 5, "rank 1 broadcast step 4 as well", "rank 0 did not post")
        agree(6)
        # The other rank forgets two steps altogether.
        if source:
            for step in (7, 8, 9):
                agree(step)
        else:
            post_and_fail(tokens, 9, "broadcast step 7 as well")
        if not source:
            post_and_fail(tokens, 10, "broadcast step 8 as well")
        else:
            agree(10)
        agree(11)
        # The source is two steps ahead.
        if source:
            agree(14)
        else:
            post_and_fail(tokens, 12, "it is at step 14")
            post_and_fail(tokens, 13, "it is at step 14")
            agree(14)
        agree(15)
        # The ranks call different operations in a step.
        drafts = DeferredBroadcast(comm, SOURCE, "drafts")
        if source:
            drafts.post(16, torch.zeros(1))
            agree(17)
        else:
            post_and_fail(tokens, 16, "broadcast 'drafts' on this channel")
            agree(17)
        # They disagree about what it is for.
        tokens.post(18, torch.zeros(1) if source else None, agreed=(int(source), 5))
        if not source:
            refused(
                ErrorKind.PROTOCOL, lambda: tokens.take(20),
                "tokens of step 18", "rank 1 posted it for [1, 5], rank 0 for [0, 5]",
            )  # fmt: skip
        else:
            tokens.take()
        agree(19)
        # The source uses the channel for something else.
        if source:
            comm.broadcast_tensor_dict({"x": 1}, SOURCE)
        else:
            post_and_fail(tokens, 20, "broadcast something else")
        comm.broadcast(torch.zeros(1) if source else None, SOURCE)

    def post_and_fail(tokens: DeferredBroadcast, step: int, *words: str) -> None:
        tokens.post(step)
        refused(
            ErrorKind.PROTOCOL,
            lambda: tokens.take(20),
            f"tokens of step {step} from rank 1",
            *words,
        )

    run(body)


def test_disagreement_names_step_operation_and_ranks(ranks: Ranks) -> None:
    ranks.run(disagree, 2)


def another_call() -> None:
    def body(comm: Communicator, source: bool) -> None:
        tokens = DeferredBroadcast(comm, SOURCE)
        if source:
            comm.broadcast(torch.zeros(1), SOURCE)
            tokens.post(1, torch.ones(1))
            tokens.take()
        else:
            tokens.post(0)
            refused(
                ErrorKind.PROTOCOL, lambda: tokens.take(20),
                "tokens of step 0 from rank 1", "the peer sent a tensor",
            )  # fmt: skip
            tokens.post(1)
            assert tokens.take(20).tolist() == [1]

    run(body)


def test_a_broadcast_of_another_kind_is_named(ranks: Ranks) -> None:
    ranks.run(another_call, 2)


def rows() -> None:
    """A row that was given to another request in between keeps what that request wrote."""

    def body(comm: Communicator, source: bool) -> None:
        generations = RowGenerations(6)
        deferred = DeferredBroadcast(comm, SOURCE)
        tokens = DeferredRows(deferred, generations)
        table = torch.full((6, 4), -1, dtype=torch.int32)

        tokens.post(0, [4, 1, 3], torch.arange(6).reshape(3, 2) if source else None)
        generations.reuse(1)
        table[1] = 99
        assert tokens.write(table, 20) == (1,)
        expected = torch.full((6, 4), -1, dtype=torch.int32)
        expected[4, :2] = torch.tensor([0, 1])
        expected[3, :2] = torch.tensor([4, 5])
        expected[1] = 99
        assert torch.equal(table, expected)

        tokens.post(1, [1], torch.tensor([[7, 8, 9]]) if source else None)
        assert tokens.write(table, 20) == ()
        assert table[1].tolist() == [7, 8, 9, 99]

        tokens.skip(2)
        before = table.clone()
        assert tokens.write(table) == ()
        assert torch.equal(table, before)

        column = torch.zeros(6)
        tokens.post(3, [0, 5], torch.tensor([2, 3]) if source else None)
        assert tokens.write(column, 20) == ()
        assert column.tolist() == [2, 0, 0, 0, 0, 3]

        tokens.post(4, [2], torch.tensor([1]) if source else None)
        generations.reuse(2)
        assert tokens.write(column, 20) == (2,)
        assert column[2] == 0

        if source:
            generations.reuse(3)
        tokens.post(5, [3], torch.tensor([5]) if source else None)
        if source:
            assert tokens.write(column) == ()
        else:
            refused(
                ErrorKind.PROTOCOL, lambda: tokens.write(column, 20),
                "tokens of step 5", "rank 1 posted it for [3, 1], rank 0 for [3, 0]",
            )  # fmt: skip
            assert column[3] == 0
        with pytest.raises(ValueError, match="distinct"):
            tokens.post(6, [1, 1])
        with pytest.raises(ValueError, match="not of 2 rows"):
            tokens.post(6, [1, 2], torch.zeros(3))

    run(body)


def test_a_reused_row_is_not_written(ranks: Ranks) -> None:
    ranks.run(rows, 2)


def lazily() -> None:
    comm = here.connect()
    if comm.rank == 1:
        received = LazyTensorDict(comm.irecv_tensor_dict(0), timeout=20)
        late = LazyTensorDict(comm.irecv_tensor_dict(0), timeout=0.01)
        assert not received.is_completed()
        assert "pending" in repr(received)
        here.meet("the receiver has its dict, and nothing was sent")
        assert received["hidden"].tolist() == [1.0, 1.0]
        assert list(received) == ["hidden", "step"]
        assert len(received) == 2
        assert received.is_completed()
        assert dict(received)["step"] == 5
        with pytest.raises(CommTimeout):
            len(late)
        here.meet("the second was waited in vain")
        patient = LazyTensorDict(late._handle, timeout=20)
        assert patient["x"] == 1
        assert late["x"] == 1
    else:
        here.meet("the receiver has its dict, and nothing was sent")
        comm.isend_tensor_dict({"hidden": torch.ones(2), "step": 5}, 1)
        here.meet("the second was waited in vain")
        comm.isend_tensor_dict({"x": 1}, 1)
    comm.close()


def test_a_lazy_dict_waits_at_first_access(ranks: Ranks) -> None:
    ranks.run(lazily, 2)


def test_how_it_is_made() -> None:
    with pytest.raises(ValueError, match="on_pending"):
        DeferredBroadcast(None, 0, on_pending="hope")  # type: ignore[arg-type]
