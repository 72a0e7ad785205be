"""How the engine's messages travel: over a commlayer communicator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from commlayer.communicator import Communicator
from commlayer.handle import Handle
from commlayer.pipeline.slices import gather_slices, receive_slices, sliced

Received = tuple[dict[str, Any], list[Handle], list[Callable[[], None]]]
"""What the engine expects of a receive: the dict, what to wait for, and what to call then."""


class Wire(Protocol):
    """Sends and receives between ranks of the pipeline group; ranks are local to it.

    No call waits for the peer.  `all_gather_group` is an engine group, `None` or of
    any size.
    """

    def isend_object(self, obj: Any, dst: int) -> Handle: ...

    def irecv_object(self, src: int) -> Handle: ...

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int,
        all_gather_group: Any,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> list[Handle]:
        """Returns the handle of the metadata, then one for each tensor that is not empty."""
        ...

    def irecv_tensor_dict(
        self, src: int, all_gather_group: Any, all_gather_tensors: Mapping[str, bool] | None
    ) -> Received:
        """The dict is empty until a handle was waited; parts are whole after the last call."""
        ...

    def close(self) -> None:
        """Deliver what was sent, within the configured time.  Raises `CommError`."""
        ...


def place_in(group: Any) -> tuple[int, int]:
    """This rank's place in an engine group, and how many ranks that has; `None` is one rank."""
    return (0, 1) if group is None else (group.rank_in_group, group.world_size)


def all_gather_in(group: Any) -> Callable[[Tensor], Tensor]:
    """The engine's own collective of `group`, which all its ranks enter in one order."""

    def all_gather(part: Tensor) -> Tensor:
        whole: Tensor = group.all_gather(part, dim=0)
        return whole

    return all_gather


class DictHandle(Handle[dict[str, Any]]):
    """The handle of a received tensor dict: waiting puts the entries into the engine's dict.

    The contract is that of `commlayer.Handle`; `result` returns the engine's dict.
    """

    __slots__ = ("_filled", "_handle", "_lock", "_target")

    def __init__(self, handle: Handle, target: dict[str, Any]) -> None:
        self._handle = handle
        self._target = target
        self._filled = False
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        self._fill(self._handle.result(timeout))

    def synchronize(self, timeout: float | None = None) -> None:
        self._handle.synchronize(timeout)
        self._fill(self._handle.result(0))

    def _fill(self, value: Mapping[str, Any]) -> None:
        with self._lock:
            if not self._filled:
                self._target.update(value)
                self._filled = True

    def is_completed(self) -> bool:
        return self._handle.is_completed()

    def exception(self) -> Any:
        return self._handle.exception()

    def result(self, timeout: float | None = None) -> dict[str, Any]:
        self.wait(timeout)
        return self._target

    def __repr__(self) -> str:
        return repr(self._handle)


class CommlayerWire:
    """Whole dicts as single messages of `comm`, typed and checked."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def isend_object(self, obj: Any, dst: int) -> Handle:
        return self.comm.isend_object(obj, dst)

    def irecv_object(self, src: int) -> Handle:
        return self.comm.irecv_object(src)

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int,
        all_gather_group: Any,
        all_gather_tensors: Mapping[str, bool] | None,
    ) -> list[Handle]:
        message = sliced(tensor_dict, all_gather_tensors, *place_in(all_gather_group))
        tensors = sum(
            isinstance(each, Tensor) and each.numel() > 0 for each in tensor_dict.values()
        )
        return [self.comm.isend_tensor_dict(message, dst)] * (1 + tensors)

    def irecv_tensor_dict(
        self, src: int, all_gather_group: Any, all_gather_tensors: Mapping[str, bool] | None
    ) -> Received:
        result: dict[str, Any] = {}

        def gather() -> None:
            gather_slices(result, place_in(all_gather_group)[1], all_gather_in(all_gather_group))

        return result, [DictHandle(receive_slices(self.comm, src), result)], [gather]

    def close(self) -> None:
        self.comm.close()
