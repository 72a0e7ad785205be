"""The null backend: the library sends, and nothing goes anywhere."""

from __future__ import annotations

import pytest
import torch
from commlayer_bench.null import connected

from commlayer.semantics import Poll


@pytest.mark.parametrize("poll", [Poll.EXACT, Poll.NEVER_BEFORE_WAIT])
def test_sends_complete_and_are_reaped(poll):
    with connected(poll) as comm:
        for _ in range(50):
            handle = comm.isend(torch.ones(8), 1)
            handle.wait(10)
            assert handle.is_completed()
        comm.drain(10)
        assert comm.ledger.snapshot().sends == 0


def test_a_receive_stays_open_until_the_connection_is_cut():
    with connected(Poll.NEVER_BEFORE_WAIT) as comm:
        handle = comm.irecv(None, 1)
        assert not handle.is_completed()
    assert handle.exception() is not None
