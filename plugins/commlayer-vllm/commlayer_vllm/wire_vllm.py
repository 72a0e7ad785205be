"""How the engine's messages travel: in its own format, for ranks without the plugin.

As read in vLLM 0.32: an int64 with the size of the metadata, the pickled
metadata, then each tensor that is not empty; all in one order, on the group for
host memory or that for devices according to the tensor.  Metadata is a list of
pairs of a key and a value or, for a tensor, its device type, dtype and size.
Which tensors come in parts is not said: both sides decide alike.

Pickled metadata lets a peer run code here.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commlayer.config import CommConfig
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.handle import Handle
from commlayer.pipeline.slices import Slice, divides, gather_slices, part_of
from commlayer.progress.deadline import checked_timeout
from commlayer_vllm.line import Line, Task
from commlayer_vllm.wire import Received, all_gather_in, place_in

_FOREVER = timedelta(days=3650)
"""A limit of a wait that expires would close all pairs of the engine's group."""


class VllmWire:
    """Sends and receives on the engine's own process groups.

    `metadata_type` is the engine's named tuple of device type, dtype and size.
    Host operations are completed by a thread per peer and direction.  Device
    tensors are posted by the thread that calls: for a receive, in `wait`.
    """

    def __init__(self, group: Any, metadata_type: Any, config: CommConfig) -> None:
        self._group = group
        self._metadata_type = metadata_type
        self._config = config
        self._sends: defaultdict[int, Line] = defaultdict(lambda: Line("commlayer send"))
        self._receives: defaultdict[int, Line] = defaultdict(lambda: Line("commlayer receive"))
        self._unposted: defaultdict[int, deque[DictReceive]] = defaultdict(deque)
        self._on_device: deque[DeviceSend] = deque()

    def isend_object(self, obj: Any, dst: int) -> Handle:
        # A buffer of its own: the bytes of a `bytes` object must not be written through a tensor.
        payload = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64)
        return self._send_host([size, payload], dst, f"send metadata to rank {dst}")

    def irecv_object(self, src: int) -> Handle:
        return self._receives[src].add(
            f"receive metadata from rank {src}", lambda: self._receive_object(src)
        )

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int,
        all_gather_group: Any,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> list[Handle]:
        metadata = [(key, self._described(value)) for key, value in tensor_dict.items()]
        handles = [self.isend_object(metadata, dst)]
        while self._on_device and self._on_device[0].is_completed():
            self._on_device.popleft()
        for key, value in tensor_dict.items():
            if not isinstance(value, Tensor) or value.numel() == 0:
                continue
            index, parts = place_in(all_gather_group)
            if divides(key, value, parts, all_gather_tensors):
                value = part_of(value, index, parts)
            handles.append(self._send_tensor(key, value.contiguous(), dst))
        return handles

    def irecv_tensor_dict(
        self, src: int, all_gather_group: Any, all_gather_tensors: Mapping[str, bool] | None
    ) -> Received:
        receive = DictReceive(self._unposted[src])
        receive.arrival = self._receives[src].add(
            f"receive a tensor dict from rank {src}",
            lambda: self._receive_dict(receive, src, all_gather_group, all_gather_tensors),
        )

        def gather() -> None:
            whole: dict[str, Any] = dict(receive.parts)
            gather_slices(whole, place_in(all_gather_group)[1], all_gather_in(all_gather_group))
            receive.target.update(whole)

        return receive.target, [receive], [gather]

    def close(self) -> None:
        deadline = time.monotonic() + self._config.close_timeout
        late = [peer for peer, line in self._sends.items() if not line.end(deadline)]
        for line in self._receives.values():
            line.end(0.0)
        if late:
            raise CommTimeout(
                "close",
                f"sends to rank {', '.join(map(str, late))} were not received within "
                f"{self._config.close_timeout:g} s",
                "See why the receiver does not receive",
            )

    # Sending

    def _described(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return self._metadata_type(value.device.type, value.dtype, value.size())

    def _send_tensor(self, key: str, tensor: Tensor, dst: int) -> Handle:
        if tensor.is_cpu:
            return self._send_host([tensor], dst, f"send {key!r} to rank {dst}")
        work = dist.isend(tensor, dst=self._group.ranks[dst], group=self._group.device_group)
        send = DeviceSend(work, tensor)
        self._on_device.append(send)
        return send

    def _send_host(self, tensors: list[Tensor], dst: int, operation: str) -> Task:
        group = self._group.cpu_group
        works = [dist.isend(tensor, dst=self._group.ranks[dst], group=group) for tensor in tensors]

        def complete(_retained: list[Tensor] = tensors) -> None:
            for work in works:
                if work is not None:
                    work.wait(_FOREVER)

        return self._sends[dst].add(operation, complete)

    # Receiving

    def _post(self, tensor: Tensor, src: int) -> Any:
        group = self._group.cpu_group if tensor.is_cpu else self._group.device_group
        return dist.irecv(tensor, src=self._group.ranks[src], group=group)

    def _receive(self, tensor: Tensor, src: int) -> Tensor:
        work = self._post(tensor, src)
        if work is not None:
            work.wait(_FOREVER)
        return tensor

    def _receive_object(self, src: int) -> Any:
        size = int(self._receive(torch.empty(1, dtype=torch.int64), src).item())
        if not 0 < size <= self._config.max_header_bytes:
            raise CommError(
                ErrorKind.PROTOCOL,
                f"receive metadata from rank {src}",
                f"the peer announced {size} bytes; at most max_header_bytes = "
                f"{self._config.max_header_bytes} are taken",
                "Make both ranks call the same operations in the same order",
            )
        payload = self._receive(torch.empty(size, dtype=torch.uint8), src)
        return pickle.loads(payload.numpy().tobytes())

    def _receive_dict(
        self,
        receive: DictReceive,
        src: int,
        all_gather_group: Any,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> dict[str, Any]:
        """On the line's thread: the metadata and the host tensors."""
        value: dict[str, Any] = {}
        works: list[Any] = []
        for key, item in self._receive_object(src):
            if not isinstance(item, self._metadata_type):
                value[key] = item
                continue
            device, dtype, shape = item
            tensor = torch.empty(shape, dtype=dtype, device=device)
            index, parts = place_in(all_gather_group)
            if divides(key, tensor, parts, all_gather_tensors):
                tensor = torch.empty(tensor.numel() // parts, dtype=dtype, device=device)
                receive.parts[key] = Slice(tensor, tuple(shape), index, parts)
            value[key] = tensor
            if tensor.numel() == 0:
                continue
            if tensor.is_cpu:
                works.append(self._post(tensor, src))
            else:
                receive.later.append(functools.partial(self._post, tensor, src))
        for work in works:
            if work is not None:
                work.wait(_FOREVER)
        return value


class DictReceive(Handle):
    """The handle of a received dict; a `commlayer.Handle`.

    `later` are the device receives that the waiting thread posts, in the order of
    the messages.
    """

    arrival: Task

    def __init__(self, unposted: deque[DictReceive]) -> None:
        self.target: dict[str, Any] = {}
        self.parts: dict[str, Slice] = {}
        self.later: list[Callable[[], Any]] = []
        self._works: list[Any] = []
        self._unposted = unposted
        unposted.append(self)

    def wait(self, timeout: float | None = None) -> None:
        value = self.arrival.result(timeout)
        while self in self._unposted:
            oldest = self._unposted.popleft()
            oldest._works = [post() for post in oldest.later]
        for work in self._works:
            if work is not None:
                work.wait()
        if not self.target:
            self.target.update(value)

    def synchronize(self, timeout: float | None = None) -> None:
        self.wait(timeout)
        for tensor in self.target.values():
            if isinstance(tensor, Tensor) and not tensor.is_cpu:
                torch.accelerator.synchronize(tensor.device)

    def is_completed(self) -> bool:
        if not self.arrival.is_completed() or (self in self._unposted and self.later):
            return False
        return all(work is None or work.is_completed() for work in self._works)

    def exception(self) -> CommError | None:
        return self.arrival.exception()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        self.wait(timeout)
        return self.target


class DeviceSend(Handle[None]):
    """The handle of one tensor sent from a device; holds the tensor until it is complete."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self._work = work
        self._tensor = tensor

    def wait(self, timeout: float | None = None) -> None:
        checked_timeout(timeout)
        if self._work is not None:
            self._work.wait()

    def synchronize(self, timeout: float | None = None) -> None:
        self.wait(timeout)
        torch.accelerator.synchronize(self._tensor.device)

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def exception(self) -> CommError | None:
        return None

    def result(self, timeout: float | None = None) -> None:
        self.wait(timeout)
