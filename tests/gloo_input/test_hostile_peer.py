"""What a peer may send below its communicator, on real gloo.

The peer sends raw bytes on the native tag of a lane, by the endpoint that its
own communicator uses.  A message that is larger than the receive is not among
them: gloo then ends the receiving process, whatever is above it.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import frames
import pytest
import torch
from frames import patched
from ranks import here
from ranks.pool import Ranks

from commlayer import CommError, Communicator, ErrorKind
from commlayer.config import CommConfig
from commlayer.wire.frame import UNSLOTTED, Kind
from commlayer.wire.message import encode_body, encode_prefix, encode_shape
from commlayer.wire.tags import CONTROL_LANE, OBJECTS, TagMap
from commlayer.wire.tensors import TensorMeta
from commlayer.wire.values import pack

framed = partial(frames.framed, inline_bytes=8192)


def terabyte() -> bytes:
    """The header of a tensor of 2**38 floats, as a sender that had one would write it."""
    meta = TensorMeta("float32", (1 << 38,), "cpu")
    body = encode_body(encode_shape((meta,), b"\x02", -1), pack(1, CommConfig(), "")[0])
    return encode_prefix(Kind.OBJECT, 0, UNSLOTTED, 0, -1, 0, body, 0) + body


class Exploit:
    def __reduce__(self) -> Any:
        return os._exit, (66,)


HOSTILE: dict[str, Any] = {
    "garbage": lambda: [b"GET / HTTP/1.1\r\n\r\n"],
    "one byte": lambda: [b"C"],
    "nothing but a prefix": lambda: [framed("x" * 500)[0][:40]],
    "truncated": lambda: [framed("x" * 500)[0][:300]],
    "damaged": lambda: [patched(framed("x" * 500)[0], 200, b"?")],
    "another version": lambda: [patched(framed(1)[0], 3, b"\x07")],
    "a body of four gigabytes": lambda: [patched(framed(1)[0], 28, b"\xff" * 4)],
    "a sequence gap": lambda: [framed(1, sequence=5)[0]],
    "a long header cut short": lambda: [framed("x" * 50_000)[0], framed("x" * 50_000)[1][:99]],
    "a terabyte": lambda: [terabyte()],
    "a million keys": lambda: framed(
        dict.fromkeys(range(1_000_000)), max_items=3_000_000, max_header_bytes=1 << 30
    ),
    "a pickle that ends the process": lambda: [framed(Exploit(), allow_pickle=True)[0]],
}


def inject(
    comm: Communicator, message: bytes, channel: str = "data", tag: str = OBJECTS, slot: int = 0
) -> Any:
    endpoint = comm._connection._context.endpoint
    tensor = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return endpoint.isend(tensor, 0, TagMap.payload(TagMap(()).native(channel, tag), slot))


def is_told(comm: Communicator) -> bool:
    """Whether sends on the lane that this rank broke are refused, with the reason."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            comm.isend_object("more", 0).wait(0.05)
        except TimeoutError:
            continue
        except CommError as error:
            return error.kind is ErrorKind.PROTOCOL and "rank 0 refuses the lane" in str(error)
    return False


def victim(comm: Communicator) -> None:
    handles = [comm.irecv_object(1), comm.irecv_object(1)]
    other_lane, other_peer = comm.irecv(None, 1, tag=1), comm.irecv_object(2)
    here.meet("posted")
    for handle in handles:
        with pytest.raises(CommError) as caught:
            handle.wait(20)
        assert caught.value.kind is ErrorKind.PROTOCOL, caught.value
        assert "rank 1" in caught.value.operation
    assert other_lane.result(20).sum() == 70_000
    assert other_peer.result(20) == "fine"


def hostile_peer(name: str) -> None:
    comm = here.connect(close_timeout=3.0)
    if comm.rank == 0:
        victim(comm)
        comm.isend_object("still here", 1)
    elif comm.rank == 1:
        here.meet("posted")
        works = [
            inject(comm, message, slot=UNSLOTTED if index else 0)
            for index, message in enumerate(HOSTILE[name]())
        ]
        comm.send(torch.ones(70_000), 0, tag=1)
        assert comm.recv_object(0) == "still here"
        assert is_told(comm)
        del works
    else:
        here.meet("posted")
        comm.send_object("fine", 0)
    here.meet("done")
    with nullcontext() if comm.rank != 1 else suppress(CommError):
        comm.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_peer_breaks_its_lane_and_nothing_else(ranks: Ranks, name: str) -> None:
    ranks.run(hostile_peer, 3, name)


def hostile_control() -> None:
    comm = here.connect(close_timeout=2.0)
    if comm.rank == 0:
        pending, other = comm.irecv_object(1), comm.irecv_object(2)
        here.meet("posted")
        with pytest.raises(CommError) as caught:
            pending.wait(20)
        assert caught.value.kind is ErrorKind.PROTOCOL
        assert other.result(20) == "fine"
    else:
        here.meet("posted")
        if comm.rank == 1:
            work = inject(comm, b"garbage", *CONTROL_LANE)
        else:
            comm.send_object("fine", 0)
    here.meet("done")
    with nullcontext() if comm.rank == 2 else suppress(CommError):
        comm.close()
    if comm.rank == 1:
        del work


def test_garbage_on_the_control_lane_loses_that_peer_only(ranks: Ranks) -> None:
    ranks.run(hostile_control, 3)
