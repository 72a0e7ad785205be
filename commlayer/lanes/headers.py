"""Buffers that header messages are received into."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

from commlayer.wire.frame import PREFIX_BYTES


class HeaderBuffer:
    """A buffer for one header message, posted again and again.

    A message may be shorter than a header.  What the buffer holds behind it is then
    the header before, whose sequence number is over, or at first nothing.
    """

    __slots__ = ("address", "tensor", "view")

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):
            self.tensor = torch.empty((size,), dtype=torch.uint8, device="cpu")
            self.tensor[:PREFIX_BYTES].zero_()
        self.address = self.tensor.data_ptr()
        self.view = memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")


class PostedHeader(NamedTuple):
    """A buffer that is posted, and the native work of its receive."""

    header: HeaderBuffer
    work: Any
