"""Which calls of the engine are replaced, known by their signatures.

The engine's version says little: builds differ, and platforms bring their own
classes.  What is replaced is recognised by what it takes and calls; anything
else is refused as a whole, before the engine is touched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_SEND = ("tensor_dict", "dst", "all_gather_group", "all_gather_tensors")
_RECEIVE = ("src", "all_gather_group", "all_gather_tensors")

GROUP_CALLS: Mapping[str, tuple[str, ...]] = {
    "isend_object": ("obj", "dst"),
    "send_object": ("obj", "dst"),
    "recv_object": ("src",),
    "isend_tensor_dict": _SEND,
    "send_tensor_dict": _SEND,
    "irecv_tensor_dict": _RECEIVE,
    "recv_tensor_dict": _RECEIVE,
    "destroy": (),
}
"""Methods of the pipeline group, with their parameters."""

GROUP_ATTRIBUTES = ("world_size", "rank_in_group", "ranks", "cpu_group", "device_group")


@dataclass(frozen=True)
class BroadcastSeam:
    """A method of the engine that broadcasts tokens, and the channel of each of its broadcasts."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    channels: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"


_FIRST, _SECOND = "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.pp_utils"

BROADCASTS = (
    BroadcastSeam(
        _FIRST,
        "GPUModelRunner",
        "_pp_broadcast_prev_sampled_token_ids",
        ("self", "sampled_token_ids"),
        ("tokens",),
    ),
    BroadcastSeam(
        _FIRST,
        "GPUModelRunner",
        "_pp_receive_prev_sampled_token_ids_to_input_batch",
        ("self",),
        ("tokens",),
    ),
    BroadcastSeam(
        _SECOND,
        "PPHandler",
        "broadcast",
        ("self", "sampled_token_ids", "num_sampled", "num_rejected", "input_batch"),
        ("tokens", "counts"),
    ),
    BroadcastSeam(
        _SECOND,
        "PPHandler",
        "broadcast_drafts",
        ("self", "draft_tokens", "input_batch"),
        ("drafts",),
    ),
    BroadcastSeam(
        _SECOND, "PPHandler", "receive", ("self", "input_batch"), ("tokens", "counts", "drafts")
    ),
)
"""What both model runners broadcast from the last stage."""

WORKER = ("vllm.v1.worker.gpu_worker", "Worker", "execute_model")


class UnknownSeams(Exception):
    """The engine is not of a kind that the plugin knows; lists what differs."""

    def __init__(self, differences: list[str]) -> None:
        self.differences = differences
        super().__init__("; ".join(differences))


def check_group(group: Any) -> None:
    """Raise `UnknownSeams` unless `group` has the calls and attributes of the pipeline group."""
    differences = [
        f"{type(group).__name__} has no {name}"
        for name in GROUP_ATTRIBUTES
        if not hasattr(group, name)
    ]
    for name, expected in GROUP_CALLS.items():
        call = getattr(group, name, None)
        found = None if call is None else _parameters(call)
        if found != expected:
            differences.append(_difference(f"{type(group).__name__}.{name}", found, expected))
    if differences:
        raise UnknownSeams(differences)


def find_broadcasts() -> list[tuple[type, BroadcastSeam]]:
    """The seams of the model runners that this build of the engine has, with their classes.

    Raises `UnknownSeams` for one that is there and is not as known.
    """
    found: list[tuple[type, BroadcastSeam]] = []
    differences: list[str] = []
    for seam in BROADCASTS:
        try:
            owner: Any = getattr(importlib.import_module(seam.module), seam.owner, None)
        except ImportError:
            continue
        function = None if owner is None else vars(owner).get(seam.name)
        if function is None:
            differences.append(f"{seam.module} has no {seam}")
        elif difference := _broadcast_difference(seam, function):
            differences.append(difference)
        else:
            found.append((owner, seam))
    if differences:
        raise UnknownSeams(differences)
    return found


def worker_waits() -> bool:
    """Whether the engine's worker waits for a step's sends before its next forward pass.

    One that does not overwrites what is being sent.
    """
    module, owner, name = WORKER
    try:
        worker = getattr(importlib.import_module(module), owner)
        function = inspect.unwrap(getattr(worker, name))
    except (ImportError, AttributeError):
        return False
    return {"_pp_send_work", "wait"} <= set(function.__code__.co_names)


def _broadcast_difference(seam: BroadcastSeam, function: Any) -> str:
    if not isinstance(function, FunctionType):
        return f"{seam} is a {type(function).__name__}, not a function"
    found = _parameters(function)
    if found != seam.parameters:
        return _difference(str(seam), found, seam.parameters)
    if not {"torch", "distributed", "broadcast"} <= set(function.__code__.co_names):
        return f"{seam} does not call torch.distributed.broadcast"
    return ""


def _parameters(call: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(call).parameters)


def _difference(what: str, found: tuple[str, ...] | None, expected: tuple[str, ...]) -> str:
    if found is None:
        return f"{what} is missing"
    return f"{what} takes ({', '.join(found)}), known is ({', '.join(expected)})"
