"""What a handle promises, one case at a time and in any order of calls."""

from __future__ import annotations

import gc
import math
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from commlayer_testkit.local import SERIALIZED, WAITED, Hub, connected
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import AllOf, Handle, checked_timeout
from commlayer.semantics import Semantics

LARGE = 3000
"""Elements of a tensor that does not travel inside the header."""

BOTH = pytest.mark.parametrize("semantics", [WAITED, SERIALIZED], ids=["waiter", "polling"])

# Timeouts


@pytest.mark.parametrize("limit", [-1, -1e-9, -math.inf, math.nan, "1", True, b"", 1j, [1]])
def test_a_wrong_timeout_is_refused_and_changes_nothing(limit: Any) -> None:
    with connected() as (a, b):
        receive = b.irecv(None, 0)
        both = AllOf([receive], lambda: 0.0)
        for call in (receive.wait, receive.synchronize, receive.result, both.wait, both.result):
            with pytest.raises(ValueError, match="timeout"):
                call(limit)
        for call in (a.drain, a.close):
            with pytest.raises(ValueError, match="timeout"):
                call(limit)
        a.isend(torch.ones(2), 1)
        assert receive.result(30).numel() == 2
        with pytest.raises(ValueError, match="timeout"):
            receive.wait(limit)


@pytest.mark.parametrize(
    ("limit", "checked"),
    [(None, None), (0, 0.0), (5, 5.0), (1e-9, 1e-9), (math.inf, None)],
)
def test_a_timeout_is_seconds_or_none(limit: Any, checked: Any) -> None:
    assert checked_timeout(limit) == checked


@pytest.mark.parametrize("limit", [1e300, 1e12, 10**30, 10**400, 2**63])
def test_a_timeout_beyond_all_clocks_is_as_good_as_none(limit: float) -> None:
    with connected() as (a, b):
        receive = b.irecv(None, 0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(receive.result, limit)
            a.send(torch.ones(2), 1)
            assert waiting.result(30).numel() == 2
        a.drain(limit)


@BOTH
@pytest.mark.parametrize("limit", [0, 1e-9, 0.01])
def test_an_expired_timeout_names_the_operation_and_changes_nothing(
    limit: float, semantics: Semantics
) -> None:
    with connected(semantics=semantics) as (a, b):
        send = a.isend(torch.arange(LARGE), 1, tag=3)
        receive = b.irecv(None, 0, tag=4)
        for handle, text in ((send, "isend to rank 1"), (receive, "irecv from rank 0")):
            for _ in range(3):
                with pytest.raises(CommTimeout, match=text) as caught:
                    handle.wait(limit)
                assert isinstance(caught.value, TimeoutError)
                assert caught.value.kind is ErrorKind.TIMEOUT
                assert "wait again" in caught.value.cure
            assert handle.exception() is None
            assert not handle.is_completed()
        with pytest.raises(CommTimeout, match="1 sends are not complete"):
            a.drain(limit)
        assert torch.equal(b.recv(None, 0, tag=3), torch.arange(LARGE))
        a.isend(torch.ones(1), 1, tag=4)
        send.wait(30)
        assert receive.result(30).numel() == 1


# Repetition


@BOTH
def test_everything_may_be_asked_again_and_again(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        receive = b.irecv(None, 0)
        send = a.isend(torch.arange(LARGE), 1)
        first = receive.result(30)
        send.wait(30)
        for comm in (a, b):
            comm.close(10)
        for _ in range(2):
            send.wait(0)
            send.synchronize()
            assert send.result() is None
            assert receive.result() is first
            assert receive.is_completed()
            assert send.is_completed()
            assert receive.exception() is send.exception() is None


@BOTH
def test_an_error_is_the_same_every_time_with_a_traceback_of_its_own(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        receive = b.irecv(torch.empty(3), 0)
        a.isend(torch.ones(4), 1)
        errors = []
        for call in (receive.wait, receive.result, receive.synchronize, lambda: receive.wait(0)):
            with pytest.raises(CommError) as caught:
                call()
            errors.append(caught.value)
        assert {(error.kind, str(error)) for error in errors} == {
            (ErrorKind.PROTOCOL, str(receive.exception()))
        }
        assert len({id(error) for error in errors}) == 4
        assert receive.is_completed()


@BOTH
def test_many_threads_wait_for_one_handle(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b), ThreadPoolExecutor(8) as pool:
        receive = b.irecv(None, 0)
        results = [pool.submit(receive.result, 30) for _ in range(8)]
        send = a.isend(torch.arange(LARGE), 1)
        waits = [pool.submit(send.wait, 30) for _ in range(8)]
        assert len({id(result.result()) for result in results}) == 1
        assert [wait.result() for wait in waits] == [None] * 8


@BOTH
def test_a_dropped_handle_changes_nothing(semantics: Semantics) -> None:
    with connected(semantics=semantics) as (a, b):
        for i in range(5):
            a.isend(torch.full((LARGE,), i), 1)
            a.isend_tensor_dict({"x": torch.full((LARGE,), i)}, 1)
        b.irecv(None, 0)
        gc.collect()
        churn = [torch.full((LARGE,), 99) for _ in range(50)]
        assert [int(b.recv(None, 0).sum()) for _ in range(4)] == [LARGE * i for i in range(1, 5)]
        assert [int(b.recv_tensor_dict(0)["x"][-1]) for _ in range(5)] == list(range(5))
        del churn


def test_a_composite_is_all_of_its_parts() -> None:
    with connected(size=3) as (a, b, c):
        value = torch.arange(LARGE)
        handle = a.broadcast(value, 0, async_op=True)
        assert b.broadcast(None, 0).numel() == LARGE
        assert not handle.is_completed()
        with pytest.raises(CommTimeout, match="to rank 2"):
            handle.wait(0.01)
        c.broadcast(None, 0)
        assert handle.result(30) is value
        assert handle.is_completed()
        assert handle.exception() is None


def test_a_composite_fails_with_its_part() -> None:
    hub = Hub(3)
    with connected(hub=hub, close_timeout=0.3) as (a, b, _):
        handle = a.broadcast(torch.ones(LARGE), 0, async_op=True)
        b.broadcast(None, 0)
        hub.kill(2)
        with pytest.raises(CommError) as caught:
            handle.wait(30)
        assert caught.value.kind is ErrorKind.PEER_LOST
        error = handle.exception()
        assert error is not None
        assert str(error) == str(caught.value)
        assert handle.is_completed()


def test_a_handle_says_in_words_what_it_is() -> None:
    with connected(check_lifetime=False) as (a, b):
        receive = b.irecv(torch.empty(2), 0, tag=5)
        assert repr(receive) == "<pending: irecv from rank 0 (channel data, tag 5)>"
        a.isend(torch.ones(3), 1, tag=5)
        with pytest.raises(CommError):
            receive.wait(30)
        assert repr(receive).startswith("<failed: irecv from rank 0")
        assert b.recv(None, 0, tag=5).numel() == 3, "what did not fit is left to the next receive"
        send = a.isend(torch.ones(1), 1, tag=5)
        b.recv(None, 0, tag=5)
        send.wait(30)
        assert repr(send).startswith("<complete: isend to rank 1")


# Any order of calls

LANES = st.tuples(st.sampled_from([0, 1]), st.sampled_from([0, 7]))
SIZES = st.sampled_from([0, 3, LARGE])


class HandleMachine(RuleBasedStateMachine):
    """Two ranks whose sends and receives are posted, waited and dropped in any order.

    The model of a lane is its list of sent numbers: the n-th receive gets the
    n-th message, whatever happened to any handle.
    """

    semantics = WAITED
    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.comms = self.stack.enter_context(
            connected(semantics=self.semantics, inline_bytes=64, close_timeout=0.05)
        )
        self.sent: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        self.asked: dict[Any, int] = defaultdict(int)
        self.number = 0
        self.closed: set[int] = set()
        self.outcomes: dict[int, Any] = {}
        self.kept: deque[Any] = deque()

    def teardown(self) -> None:
        if not self.closed:
            self._receive_the_rest()
        self.stack.close()
        for comm in self.comms:
            snapshot = comm.ledger.snapshot()
            assert snapshot.operations == ()
            assert (snapshot.sends, snapshot.bytes) == (0, 0)

    def _receive_the_rest(self) -> None:
        for (source, tag), sent in self.sent.items():
            for number, size in sent[self.asked[source, tag] :]:
                received = self.comms[1 - source].irecv(None, source, tag).result(30)
                assert received.tolist() == [number] * size
        for comm in self.comms:
            comm.drain(30)
            assert comm.ledger.snapshot().sends == 0

    @rule(target=handles, lane=LANES, size=SIZES)
    def send(self, lane: tuple[int, int], size: int) -> Any:
        source, tag = lane
        tensor = torch.full((size,), self.number)
        if self.closed:
            return self._refused(lambda: self.comms[source].isend(tensor, 1 - source, tag), source)
        handle = self.comms[source].isend(tensor, 1 - source, tag)
        index = len(self.sent[lane])
        self.sent[lane].append((self.number, size))
        self.number += 1
        return handle, "send", lane, index

    @rule(target=handles, lane=LANES)
    def receive(self, lane: tuple[int, int]) -> Any:
        source, tag = lane
        if self.closed:
            return self._refused(
                lambda: self.comms[1 - source].irecv(None, source, tag), 1 - source
            )
        handle = self.comms[1 - source].irecv(None, source, tag)
        index = self.asked[lane]
        self.asked[lane] += 1
        return handle, "receive", lane, index

    def _refused(self, call: Any, rank: int) -> Any:
        """After a close: the call raises, or what it returns does not hang."""
        try:
            handle = call()
        except CommError as error:
            assert error.kind is ErrorKind.CLOSED  # noqa: PT017
            return None
        assert rank not in self.closed
        return handle, "late", None, 0

    def _certain(self, kind: str, lane: Any, index: int) -> bool:
        """Whether the operation must complete: its counterpart was posted."""
        posted = self.asked[lane] if kind == "send" else len(self.sent[lane])
        return kind != "late" and index < posted

    @rule(entry=handles, limit=st.sampled_from([None, 0, 1e-4]))
    def wait(self, entry: Any, limit: float | None) -> None:
        if entry is None:
            return
        handle, kind, lane, index = entry
        certain = bool(self.closed) or self._certain(kind, lane, index)
        if limit is None or limit > 1:
            limit = 30.0 if certain else 0.001
        was_over = handle.is_completed()
        try:
            result = handle.result(limit)
        except CommTimeout:
            assert not was_over
            assert limit < 30
        except CommError as error:
            assert self.closed
            self._same(handle, (error.kind, str(error)))
        else:
            if kind == "receive":
                number, size = self.sent[lane][index]
                assert result.tolist() == [number] * size
            else:
                assert result is None
            self._same(handle, "well")
            assert handle.is_completed()

    def _same(self, handle: Handle, outcome: Any) -> None:
        self.kept.append(handle)
        assert self.outcomes.setdefault(id(handle), outcome) == outcome

    @rule(entry=handles)
    def ask(self, entry: Any) -> None:
        if entry is None:
            return
        handle, kind, lane, index = entry
        before = handle.is_completed()
        error = handle.exception()
        if before and not self.closed:
            assert error is None
            if kind == "receive":
                assert index < len(self.sent[lane])
        if error is not None:
            assert handle.is_completed()
        assert handle.is_completed() >= before

    @rule(entry=handles)
    def ask_from_another_thread(self, entry: Any) -> None:
        thread = threading.Thread(target=self.ask, args=(entry,))
        thread.start()
        thread.join(30)
        assert not thread.is_alive()

    @rule(lane=LANES, size=SIZES)
    @precondition(lambda self: not self.closed)
    def send_and_drop(self, lane: tuple[int, int], size: int) -> None:
        self.send(lane, size)
        gc.collect()

    @rule(rank=st.sampled_from([0, 1]))
    @precondition(lambda self: not self.closed)
    def drain(self, rank: int) -> None:
        pending = any(
            self.asked[lane] < len(sent) for lane, sent in self.sent.items() if lane[0] == rank
        )
        try:
            self.comms[rank].drain(0.001 if pending else 30.0)
        except CommTimeout:
            assert pending

    @rule(rank=st.sampled_from([0, 1]), again=st.booleans())
    @precondition(lambda self: self.number > 3)
    def close(self, rank: int, again: bool) -> None:
        for _ in range(1 + again):
            try:
                self.comms[rank].close(0.05)
            except CommTimeout as error:
                raise AssertionError("the peer answers at any time") from error
            except CommError as error:
                assert error.kind is ErrorKind.CLOSED  # noqa: PT017
            self.closed.add(rank)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        for rank, comm in enumerate(self.comms):
            snapshot = comm.ledger.snapshot()
            posted = sum(len(sent) for lane, sent in self.sent.items() if lane[0] == rank)
            assert 0 <= snapshot.sends <= posted
            assert snapshot.bytes >= 0
            assert (snapshot.sends == 0) == (snapshot.bytes == 0)


class PolledHandleMachine(HandleMachine):
    semantics = SERIALIZED


BUDGET = settings(max_examples=12, stateful_step_count=20)
TestHandles = HandleMachine.TestCase
TestHandles.settings = BUDGET
TestPolledHandles = PolledHandleMachine.TestCase
TestPolledHandles.settings = BUDGET
