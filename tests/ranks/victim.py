"""What tests of a lost peer share: who it is, how that shows, and traffic beside it."""

from __future__ import annotations

import pytest
import torch

from commlayer import CommError, Communicator, ErrorKind, Handle

VICTIM = 1
LARGE = 1 << 18
"""Elements of a tensor whose payload travels beside its header."""


def exchange(comm: Communicator, peer: int) -> None:
    """Traffic with `peer` in both directions, inline and large."""
    for elements in (16, LARGE):
        send = comm.isend(torch.full((elements,), float(comm.rank)), peer)
        received = comm.recv(None, peer)
        assert torch.equal(received, torch.full((elements,), float(peer)))
        send.wait(20)


def lost(handle: Handle) -> CommError:
    """The error of a handle whose peer is lost."""
    with pytest.raises(CommError, match=f"rank {VICTIM}") as caught:
        handle.wait(20)
    assert caught.value.kind is ErrorKind.PEER_LOST
    return caught.value
