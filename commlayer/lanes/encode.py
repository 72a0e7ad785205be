"""What is sent: checked and encoded, or refused before anything leaves the rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.device.reach import Memory
from commlayer.device.side import DeviceSide
from commlayer.errors import CommError, ErrorKind
from commlayer.progress.operation import Operation
from commlayer.progress.retention import RetentionPolicy
from commlayer.wire.frame import APART, Kind, Placement
from commlayer.wire.message import Layout, Layouts, Outgoing
from commlayer.wire.tensors import as_bytes, check_size, sendable
from commlayer.wire.values import pack


class Encoder:
    """Makes messages of tensors and values.

    With `at_most` a message has exactly one tensor, of at most so many bytes, and
    always carries that many.  Everything that cannot be sent raises `CommError`
    (UNSUPPORTED, or CONFIG for a wrong argument).
    """

    def __init__(
        self,
        *,
        config: CommConfig,
        retention: RetentionPolicy,
        memory: Memory,
        side: DeviceSide | None,
    ) -> None:
        self._config = config
        self._layouts = Layouts(config.inline_bytes, None if side is None else side.device.holds)
        self._retention = retention
        self._memory = memory
        self._side = side

    def encode(
        self, operation: Operation, kind: Kind, value: Any, step: int = -1, at_most: int = -1
    ) -> Outgoing:
        """The message of a value; an equal dict of tensors is not packed a second time."""
        if kind is Kind.TENSOR:
            tensors = [sendable(value, operation, self._config)]
            return self._encode(operation, kind, tensors, b"", step, at_most)
        key = None
        if kind is Kind.TENSOR_DICT:
            if at_most < 0:
                found = self._layouts.recall(value)
                if found.known is not None:
                    layout, packed = found.known
                    if not layout.apart:
                        return Outgoing(layout, found.tensors, packed, step)
                    return self._message(operation, layout, found.tensors, packed, step)
                key = found.key
            value = as_dict(value, operation)
        packed, tensors = pack(value, self._config, operation)
        outgoing = self._encode(operation, kind, tensors, packed, step, at_most)
        if key is not None:
            self._layouts.remember(key, outgoing.layout, packed)
        return outgoing

    def _encode(
        self,
        operation: Operation,
        kind: Kind,
        tensors: Sequence[Tensor],
        packed: bytes,
        step: int,
        at_most: int,
    ) -> Outgoing:
        """The message of `tensors`, which are `sendable`, and a packed value."""
        self._memory.check_sources(tensors, operation)
        if at_most >= 0:
            self._check_declared(tensors, at_most, operation)
        reserved = at_most >= 0 and self._side is not None
        layout = self._layouts.place(kind, tensors, at_most, reserved)
        check_size(max(layout.tensor_bytes, at_most), operation, self._config)
        header_bytes = layout.header_bytes + len(packed)
        if header_bytes > self._config.max_header_bytes:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                f"a header of {header_bytes} bytes exceeds max_header_bytes = "
                f"{self._config.max_header_bytes}",
                "Send fewer tensors at once, or raise the limit on all ranks",
            )
        return self._message(operation, layout, tensors, packed, step)

    def _check_declared(
        self, tensors: Sequence[Tensor], at_most: int, operation: Operation
    ) -> None:
        cause = ""
        if len(tensors) != 1:
            cause = f"at_most declares the size of one tensor, there are {len(tensors)}"
        elif tensors[0].nbytes > at_most:
            cause = f"the tensor has {tensors[0].nbytes} bytes, at_most = {at_most}"
        elif self._side is not None and not self._memory.on_device(tensors[0]):
            cause = f"at_most declares a tensor on the device, this is on {tensors[0].device}"
        if cause:
            raise CommError(
                ErrorKind.CONFIG,
                operation.describe(),
                cause,
                "Declare the largest size, on all ranks, for one tensor on the device",
            )

    def _message(
        self,
        operation: Operation,
        layout: Layout,
        tensors: Sequence[Tensor],
        packed: bytes,
        step: int,
    ) -> Outgoing:
        """Leave what is not copied into the header to the retention policy."""
        reserved = None
        if layout.apart:
            places = layout.placements
            apart = [place in APART for place in places]
            kept = iter(
                self._retain(
                    operation,
                    [tensor for tensor, is_apart in zip(tensors, apart, strict=True) if is_apart],
                )
            )
            tensors = [
                next(kept) if is_apart else tensor
                for tensor, is_apart in zip(tensors, apart, strict=True)
            ]
            if places[0] == Placement.RESERVED:
                reserved = self._padded(tensors[0], layout.at_most)
        return Outgoing(layout, tensors, packed, step, reserved)

    def _retain(self, operation: Operation, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What the policy posts in place of `tensors`; a policy that raises has refused them."""
        try:
            return self._retention.retain(tensors)
        except CommError as error:
            raise CommError(error.kind, operation.describe(), error.cause, error.cure) from error
        except Exception as error:
            raise CommError(
                ErrorKind.UNSUPPORTED,
                operation.describe(),
                f"retention policy {self._retention.name!r} cannot keep the source ({error})",
                "Send less at once, or choose another policy",
            ) from error

    def _padded(self, tensor: Tensor, size: int) -> Tensor:
        """Device memory of `size` bytes that begins with those of `tensor`."""
        assert self._side is not None
        device = self._side.device
        data = as_bytes(tensor)
        if data.numel() == size:
            return data
        with torch.inference_mode(False):
            padded = device.empty((size,), torch.uint8)
        if data.numel():
            device.copy(padded[: data.numel()], data)
        return padded


def as_dict(value: Any, operation: Operation) -> dict[str, Any]:
    """`value` as a dict, itself if it is one; `CommError` (CONFIG) unless its keys are str."""
    try:
        # A copy of any other mapping, whose items may be computed anew at each look.
        entries = dict(value.items()) if isinstance(value, Mapping) else None
    except Exception as error:
        raise CommError(
            ErrorKind.UNSUPPORTED,
            operation.describe(),
            f"the tensor dict cannot be read ({type(error).__name__}: {error})",
            "Correct its class, or pass a dict",
        ) from error
    if entries is None or not all(isinstance(key, str) for key in entries):
        raise CommError(
            ErrorKind.CONFIG,
            operation.describe(),
            "a tensor dict is a mapping whose keys are str",
            "Use isend_object for other values",
        )
    return value if type(value) is dict else entries
