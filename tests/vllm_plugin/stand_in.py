"""Classes that look to the plugin like the engine's."""

from __future__ import annotations

import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from commlayer_vllm.install import install
from commlayer_vllm.pipeline_group import PipelineGroup
from commlayer_vllm.settings import settings_of
from ranks import here

TensorMetadata = namedtuple("TensorMetadata", ["device", "dtype", "size"])


class Group:
    """The engine's group object, as far as its signatures go."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self.world_size, self.rank_in_group = size, rank
        self.ranks = list(range(size))
        self.cpu_group: Any = None
        self.device_group: Any = None
        self.destroyed = 0

    def isend_object(self, obj: Any, dst: int) -> Any: ...

    def send_object(self, obj: Any, dst: int) -> None: ...

    def recv_object(self, src: int) -> Any: ...

    def isend_tensor_dict(
        self,
        tensor_dict: dict[str, Any],
        dst: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> Any: ...

    send_tensor_dict = isend_tensor_dict

    def irecv_tensor_dict(
        self,
        src: int | None = None,
        all_gather_group: Any = None,
        all_gather_tensors: dict[str, bool] | None = None,
    ) -> Any: ...

    recv_tensor_dict = irecv_tensor_dict

    def destroy(self) -> None:
        self.destroyed += 1


def connected_group() -> Group:
    """The stand-in with real gloo groups of all ranks."""
    dist.init_process_group("gloo")
    group = Group(here.rank(), here.world_size())
    group.cpu_group = dist.new_group(backend="gloo")
    group.device_group = dist.new_group(backend="gloo")
    return group


def installed(group: Group, **table: Any) -> PipelineGroup:
    """Install commlayer on `group` and return what was installed."""
    result = install(group, settings_of({"connect_timeout": 20.0, **table}, "cpu", environ={}))
    assert result is not None
    return result


def end(group: Group) -> None:
    """Destroy `group` on all ranks at once, as the engine's shutdown does."""
    group.destroy()
    assert group.destroyed == 1
    dist.destroy_process_group()


class Runner:
    """The broadcasts of the first runner."""

    def _pp_broadcast_prev_sampled_token_ids(self, sampled_token_ids: Any) -> None:
        self.broadcast(sampled_token_ids)

    def _pp_receive_prev_sampled_token_ids_to_input_batch(self) -> Any: ...

    def broadcast(self, tensor: Any) -> None: ...


class Engine:
    """Stand-in modules of the engine in ``sys.modules``, and what it is configured with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.config: Any = SimpleNamespace(
            additional_config={},
            scheduler_config=SimpleNamespace(max_num_seqs=16),
            speculative_config=None,
        )
        self.group = Group()
        self.made = 0
        self.module("vllm")
        self.module("vllm.config", get_current_vllm_config_or_none=lambda: self.config)
        self.module("vllm.platforms", current_platform=SimpleNamespace(device_type="cpu"))
        self.state = self.module(
            "vllm.distributed.parallel_state",
            initialize_model_parallel=self._make,
            get_pp_group=lambda: self.group,
            TensorMetadata=TensorMetadata,
        )

    def module(self, name: str, **contents: Any) -> Any:
        """A module with these contents."""
        module = ModuleType(name)
        vars(module).update(contents)
        self._monkeypatch.setitem(sys.modules, name, module)
        return module

    def _make(self, size: int = 1) -> str:
        """Make the groups."""
        self.made += size
        return "made"
