"""Receives the payload of a lane's messages: what travels beside their headers.

Payload must be received even if nobody wants it or there is no memory for it: messages on
one native tag come in order, so what is left would be taken for the next one.  It is then
*owed*, and received into scratch memory as soon as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commlayer.backend import Endpoint
from commlayer.errors import About, CommError, ErrorKind
from commlayer.progress.claim import Claim
from commlayer.progress.procedure import NativeWork, Procedure
from commlayer.wire.reader import Incoming, Schema
from commlayer.wire.tensors import TensorMeta, as_bytes, from_meta


class _AheadOfHeader(NamedTuple):
    """Receives posted for the next message of a schema: tensors and native works.

    Both are empty where there was no memory to post them.
    """

    schema: Schema
    tensors: list[Tensor]
    works: list[Any]


class PayloadReceiver:
    """Receives payload into a claim's memory, new memory, or what was posted ahead of its header.

    `post(buffer, slot)` posts a native receive.  With `serial` one is outstanding
    at a time.
    """

    def __init__(
        self, endpoint: Endpoint, post: Callable[[Tensor, int], Any], serial: bool, where: About
    ) -> None:
        self._endpoint = endpoint
        self._post = post
        self._serial = serial
        self._where = where
        self._ahead: dict[int, _AheadOfHeader] = {}
        self._owed: deque[tuple[int, int]] = deque()
        """Slot and size of payload that nobody wants and that has not been received yet."""

    @property
    def pending(self) -> bool:
        """Whether receives are posted ahead."""
        return any(ahead.works for ahead in self._ahead.values())

    def receive(self, incoming: Incoming, claim: Claim | None) -> Procedure:
        """Receive the payload: into what was posted ahead, the claim's memory, or new tensors.

        Payload that nobody wants (no `claim`), or that finds no memory, is owed to the
        sender: it is received and thrown away as soon as there is room.
        """
        schema, slot = incoming.schema, incoming.slot
        posted = self._ahead.pop(slot, None)
        if posted is not None and posted.schema is not schema:
            yield from self._take_ahead(slot, posted)
            posted = None
        if posted is not None and posted.works:
            works = deque(posted.works)
            for index, tensor in zip(schema.payload, posted.tensors, strict=True):
                incoming.tensors[index] = tensor
            del posted  # the claim gets its tensors, this frame must not keep them
            while works:
                yield NativeWork(self._endpoint, works.popleft())
            return
        wanted = claim is not None
        # What is owed was sent before: on one tag it comes first.
        yield from self.throw_away_owed()
        buffers = self._buffers(incoming, claim) if wanted and not self._owed else None
        if buffers is None:
            sizes = [schema.parts[index][2] for index in schema.payload]
            incoming.lost_bytes = sum(sizes) if wanted else 0
            self._owed.extend((slot, size) for size in sizes)
            yield from self.throw_away_owed()
            return
        works = deque()
        while buffers:
            works.append(self._post(buffers.popleft(), slot))
            if self._serial:
                yield NativeWork(self._endpoint, works.pop())
        while works:
            yield NativeWork(self._endpoint, works.popleft())

    def _buffers(self, incoming: Incoming, claim: Claim | None) -> deque[Tensor] | None:
        """Memory for the payload; ``None`` unless there is room for all of it."""
        buffers: deque[Tensor] = deque()
        for index in incoming.schema.payload:
            buffer = None if claim is None else claim.buffer(incoming, index)
            if buffer is None:
                fresh = _allocate(incoming.body.tensors[index])
                if fresh is None:
                    return None
                incoming.tensors[index] = fresh
                buffer = as_bytes(fresh)
            buffers.append(buffer)
        return buffers

    def throw_away_owed(self) -> Procedure:
        """Receive what nobody wants, as far as there is memory for it."""
        while self._owed:
            slot, size = self._owed[0]
            scratch = _allocate(TensorMeta("uint8", (size,), "cpu"))
            if scratch is None:
                return
            yield NativeWork(self._endpoint, self._post(scratch, slot))
            self._owed.popleft()

    def post_ahead(self, schema: Schema, slot: int) -> None:
        """Post the receives for the next message of `schema`, if there is memory for them."""
        tensors: list[Tensor] = []
        for index in schema.payload:
            tensor = None if self._owed else _allocate(schema.body.tensors[index])
            if tensor is None:
                tensors = []
                break
            tensors.append(tensor)
        works = [self._post(as_bytes(tensor), slot) for tensor in tensors]
        self._ahead[slot] = _AheadOfHeader(schema, tensors, works)

    def _take_ahead(self, slot: int, ahead: _AheadOfHeader) -> Procedure:
        """Complete receives posted ahead that the sender has filled with a byte each."""
        for work in ahead.works:
            yield NativeWork(self._endpoint, work)
        if not ahead.works:  # there was no memory to post them: the bytes come all the same
            for _ in ahead.schema.payload:
                byte = from_meta(TensorMeta("uint8", (1,), "cpu"), "cpu")
                yield NativeWork(self._endpoint, self._post(byte, slot))

    def end(self) -> Procedure:
        """Complete every receive that was posted ahead, and what is still owed."""
        yield from self.throw_away_owed()
        if self._owed:
            raise CommError(
                ErrorKind.PROTOCOL,
                self._where,
                f"no memory for {sum(size for _, size in self._owed)} bytes that were sent before",
                "Send less at once",
            )
        for slot, posted in self._ahead.items():
            yield from self._take_ahead(slot, posted)
        self._ahead.clear()


def _allocate(meta: TensorMeta) -> Tensor | None:
    """New memory for a tensor on the host; ``None`` if there is none."""
    try:
        with torch.inference_mode(False):
            return from_meta(meta, "cpu")
    except (RuntimeError, MemoryError):
        return None
