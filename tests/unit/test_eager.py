"""Sends that are complete before the peer has asked: what was sent is not lost by closing."""

from __future__ import annotations

import threading

import pytest
import torch
from commlayer_testkit.local import EAGER, connected

from commlayer.communicator import Communicator
from commlayer.errors import CommError


def close_in_background(comm: Communicator) -> threading.Thread:
    thread = threading.Thread(target=comm.close)
    thread.start()
    return thread


def test_messages_on_lanes_that_nobody_had_read_outlive_the_close_of_their_sender() -> None:
    with connected(semantics=EAGER) as (sender, receiver):
        for number in range(3):
            sender.send_object(number, 1)
        sender.send(torch.arange(4000), 1, tag=7)
        sender.close()
        assert [receiver.recv_object(0) for _ in range(3)] == [0, 1, 2]
        target = torch.empty(4000, dtype=torch.int64)
        receiver.recv(target, 0, tag=7)
        assert torch.equal(target, torch.arange(4000))
        with pytest.raises(CommError, match="closed"):
            receiver.recv_object(0)


def test_two_ranks_that_close_at_once_leave_unread_messages_behind() -> None:
    with connected(semantics=EAGER, close_timeout=100.0) as comms:
        for comm in comms:
            comm.isend(torch.arange(4000), 1 - comm.rank).wait(5)
        threads = [close_in_background(comm) for comm in comms]
        for thread in threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in threads)
