"""What the tests ask of a worker of the engine (its ``worker_extension_cls``)."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist


class Probe:
    """Methods that the driver calls by name on every worker."""

    def watch(self) -> None:
        """Count, from now on, the engine's steps and its own messages of the pipeline group."""
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
        self.steps = 0
        self.stock = 0
        groups = (group.cpu_group, group.device_group)
        for name in ("isend", "irecv", "send", "recv", "broadcast"):
            setattr(dist, name, self._counted(getattr(dist, name), groups))
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        forward = runner._model_forward

        def counted(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            return forward(*arguments, **named)

        runner._model_forward = counted

    def _counted(self, call: Any, groups: tuple[Any, ...]) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            if named.get("group") in groups:
                self.stock += 1
            return call(*arguments, **named)

        return counted

    def report(self) -> dict[str, Any]:
        """Steps, the engine's own messages, those of commlayer, and what is retained."""
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
        installed = getattr(group, "_commlayer", None)
        report: dict[str, Any] = {
            "stage": group.rank_in_group,
            "pid": os.getpid(),
            "steps": self.steps,
            "stock": self.stock,
            "shared_memory": bool(group.use_cpu_custom_send_recv),
            "retained": len(group._pending_isends),
            "resident": _resident(),
            "commlayer": None,
        }
        if installed is not None:
            report["commlayer"] = dict(installed.counts)
            comm = getattr(installed.wire, "comm", None)
            if comm is not None:
                report["retained"] += len(comm.ledger.snapshot().operations)
        return report


def _resident() -> int:
    """Resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def without_shared_memory() -> None:
    """Have the stock engine use its process groups (a ``vllm.general_plugins`` entry point)."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
