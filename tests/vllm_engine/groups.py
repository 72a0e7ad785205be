"""The engine's own groups in processes of a test, without the engine around them."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from commlayer_vllm.install import install
from commlayer_vllm.pipeline_group import PipelineGroup
from commlayer_vllm.settings import settings_of
from ranks import here
from ranks.pool import Ranks
from vllm.distributed.parallel_state import GroupCoordinator


def make(groups: list[list[int]], name: str = "pp", cls: type = GroupCoordinator) -> Any:
    """The engine's group object for this rank, of those with the given ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return cls(
        group_ranks=groups,
        local_rank=here.rank(),
        torch_distributed_backend="gloo",
        use_device_communicator=False,
        group_name=name,
    )


def pipeline(cls: type = GroupCoordinator) -> Any:
    """One pipeline group of all ranks."""
    return make([list(range(here.world_size()))], cls=cls)


def installed(group: Any, **table: Any) -> PipelineGroup:
    """Install commlayer on `group` and return what was installed."""
    result = install(group, settings_of({"connect_timeout": 20.0, **table}, "cpu", environ={}))
    assert result is not None
    return result


def end(group: Any) -> None:
    """Destroy `group` on all ranks at once, as the engine's shutdown does."""
    group.destroy()
    dist.destroy_process_group()


def killed(ranks: Ranks, body: Callable[[], None]) -> None:
    """Run `body` on two ranks and kill rank 1 once it has said that messages flow.

    Each says when it is connected and waits for a word; rank 0 must end well.
    """
    survivor, victim = ranks.spawn(body, 2, finalize=False)
    for process in (survivor, victim):
        process.hear()
    for process in (survivor, victim):
        process.say("go")
    victim.hear()
    victim.signal(signal.SIGKILL)
    assert victim.wait() == -signal.SIGKILL
    survivor.result(20)
