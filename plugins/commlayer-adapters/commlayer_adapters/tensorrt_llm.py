"""The point-to-point half of TensorRT-LLM's ``MPIDist`` over commlayer.

Replaced are ``isend``, ``send``, ``recv`` of numpy buffers and ``send_object``,
``isend_object``, ``recv_object``, with their tags.  Collectives over tensor- and
context-parallel groups stay with MPI or torch.  Objects that are no plain values are
registered (`commlayer.register`), or ``allow_pickle`` is set.
"""

from __future__ import annotations

from typing import Any

import torch

from commlayer import Communicator, Handle


class PointToPoint:
    """Mix it in before ``MPIDist``; `comm` has the ranks of the world."""

    comm: Communicator

    def isend(self, buf: Any, dest: int, tag: int = 0) -> Handle:
        """Send a numpy array; it is kept alive, and must not be written before the wait."""
        return self.comm.isend(torch.from_numpy(buf), dest, tag)

    def send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a numpy array, and wait until it may be written."""
        self.isend(buf, dest, tag).wait()

    def recv(self, buf: Any, src: int, tag: int = 0) -> Any:
        """Receive in place, into a numpy array; returns it."""
        self.comm.recv(torch.from_numpy(buf), src, tag)
        return buf

    def isend_object(self, obj: Any, dest: int, tag: int = 0) -> Handle:
        """Send a value; the handle is what ``mpi_isend_object`` returns."""
        return self.comm.isend_object(obj, dest, tag=tag)

    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send a value, and wait until it may be changed."""
        self.isend_object(obj, dest, tag).wait()

    def recv_object(self, src: int, tag: int = 0) -> Any:
        """Receive a value."""
        return self.comm.recv_object(src, tag=tag)
