"""The calls of the engine's pipeline group, answered by commlayer.

They are set on the one group object and hide the methods of its class; what
they need beside the group's ranks lives here, so that a group whose class skips
the usual constructor serves as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from commlayer.errors import CommError, ErrorKind
from commlayer.handle import Handle
from commlayer_vllm.broadcasts import TokenBroadcasts
from commlayer_vllm.log import logger
from commlayer_vllm.wire import Received, Wire

REPLACED = (
    "isend_object",
    "send_object",
    "recv_object",
    "isend_tensor_dict",
    "send_tensor_dict",
    "irecv_tensor_dict",
    "recv_tensor_dict",
)

_MARK = "_commlayer"


class PipelineGroup:
    """Replacements for the methods of the engine's group that are named in `REPLACED`.

    Signatures and results are the engine's: ranks are local to the group, no
    destination means the next rank and no source the previous one, a world of one
    sends nothing and has no handles, and the first handle of a dict is that of its
    metadata.  `counts` says how many operations of each kind were posted here.
    """

    def __init__(
        self,
        group: Any,
        wire: Wire,
        counts: Counter[str],
        broadcasts: TokenBroadcasts | None = None,
    ) -> None:
        self.wire = wire
        self.counts = counts
        self._group = group
        self.broadcasts = broadcasts
        self._destroy: Callable[[], None] = group.destroy

    @staticmethod
    def of(group: Any) -> PipelineGroup | None:
        """What is installed on `group`."""
        return getattr(group, _MARK, None)

    def install(self) -> None:
        """Set the replacements on the group object, and close when the group is destroyed."""
        for name in (*REPLACED, "destroy"):
            setattr(self._group, name, getattr(self, name))
        setattr(self._group, _MARK, self)

    def uninstall(self) -> None:
        """Give the engine back its own methods; closes nothing."""
        for name in (*REPLACED, "destroy", _MARK):
            vars(self._group).pop(name, None)
        if self.broadcasts is not None:
            self.broadcasts.uninstall()

    def isend_object(self, obj: Any, dst: int) -> Handle:
        self.counts["objects sent"] += 1
        return self.wire.isend_object(obj, self._peer(dst, "isend_object"))

    def send_object(self, obj: Any, dst: int) -> None:
        self.isend_object(obj, dst).wait()

    def recv_object(self, src: int) -> Any:
        self.counts["objects received"] += 1
        return self.wire.irecv_object(self._peer(src, "recv_object")).result()

    def isend_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> list[Handle]:
        if self._group.world_size <= 1:
            return []
        peer = self._peer(dst, "isend_tensor_dict", step=1)
        self.counts["dicts sent"] += 1
        return self.wire.isend_tensor_dict(tensor_dict, peer, all_gather_group, all_gather_tensors)

    def send_tensor_dict(
        self,
        tensor_dict: Mapping[str, Any],
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Mapping[str, Any] | None:
        if self._alone():
            return tensor_dict
        for handle in self.isend_tensor_dict(
            tensor_dict, dst, all_gather_group, all_gather_tensors
        ):
            handle.wait()
        return None

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> Received | tuple[None, list[Handle], list[Callable[[], None]]]:
        if self._alone():
            return None, [], []
        peer = self._peer(src, "irecv_tensor_dict", step=-1)
        self.counts["dicts received"] += 1
        return self.wire.irecv_tensor_dict(peer, all_gather_group, all_gather_tensors)

    def recv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: Mapping[str, bool] | None = None,
    ) -> dict[str, Any] | None:
        result, handles, calls = self.irecv_tensor_dict(src, all_gather_group, all_gather_tensors)
        for handle in handles:
            handle.wait()
        for call in calls:
            call()
        return result

    def destroy(self) -> None:
        """Deliver what is in flight, part from the peers, then destroy the engine's group."""
        counted = ", ".join(f"{number} {what}" for what, number in sorted(self.counts.items()))
        try:
            self.wire.close()
            logger.info("commlayer: closed; %s", counted or "nothing was sent")
        except CommError as error:
            logger.warning("commlayer: closed with an error (%s); %s", error, counted)
        finally:
            self.uninstall()
            self._destroy()

    def _alone(self) -> bool:
        return not dist.is_initialized() or self._group.world_size == 1

    def _peer(self, rank: int | None, call: str, step: int = 0) -> int:
        size, own = self._group.world_size, self._group.rank_in_group
        peer = (own + step) % size if rank is None else rank
        if not 0 <= peer < size or peer == own:
            raise CommError(
                ErrorKind.CONFIG,
                call,
                f"rank {peer} is not another rank of the pipeline group",
                f"Ranks are local to the group: 0 to {size - 1}, {own} is this one",
            )
        return peer
