"""What happens once the engine has made its groups."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import msgspec

from commlayer.bootstrap.connector import connect
from commlayer_vllm import seams
from commlayer_vllm.broadcasts import TokenBroadcasts
from commlayer_vllm.log import logger, show_library_log
from commlayer_vllm.pipeline_group import REPLACED, PipelineGroup
from commlayer_vllm.settings import VARIABLE, Settings
from commlayer_vllm.wire import CommlayerWire
from commlayer_vllm.wire_vllm import VllmWire


def install(group: Any, settings: Settings) -> PipelineGroup | None:
    """Install on `group`; all its ranks call this.  A second call changes nothing.

    Returns ``None``, and leaves the engine as it is, in a world of one and for an
    engine that is not recognised.  Raises `CommError` where commlayer cannot
    connect: some ranks may have.
    """
    present = PipelineGroup.of(group)
    if present is not None:
        return present
    if group.world_size == 1:
        logger.info("commlayer: one pipeline stage, nothing to replace")
        return None
    show_library_log()
    try:
        seams.check_group(group)
        runners = seams.find_broadcasts()
    except seams.UnknownSeams as unknown:
        _refuse(unknown)
        return None
    if settings.wire_format == "vllm":
        return _install_engine_format(group, settings)
    return _install(group, settings, runners)


def _install(
    group: Any, settings: Settings, runners: list[tuple[type, seams.BroadcastSeam]]
) -> PipelineGroup:
    config = settings.config
    waits = seams.worker_waits()
    if not waits:
        config = msgspec.structs.replace(config, retention="copy_on_post", copy_max_bytes=0)
    comm = connect(config, group=group.cpu_group)
    counts: Counter[str] = Counter()
    broadcasts = TokenBroadcasts(group, comm, settings, counts)
    broadcasts.install(runners)
    pipeline = PipelineGroup(group, CommlayerWire(comm), counts, broadcasts)
    pipeline.install()
    logger.info(
        "commlayer: rank %d of %d, backend %s; replaced %s of the pipeline group%s, and %s; "
        "buffers sent: %s",
        comm.rank,
        comm.world_size,
        comm.backend,
        ", ".join(REPLACED),
        _shared_memory(group),
        ", ".join(str(seam) for _, seam in runners) or "no broadcasts",
        "the worker waits before it overwrites them"
        if waits
        else "copied, since the worker does not wait before it overwrites them",
    )
    return pipeline


def _install_engine_format(group: Any, settings: Settings) -> PipelineGroup | None:
    if getattr(group, "use_cpu_custom_send_recv", False):
        logger.error(
            'commlayer: wire_format = "vllm" is refused, nothing is replaced: this engine sends '
            "tensor dicts through shared memory, not in its format for process groups"
        )
        return None
    metadata = importlib.import_module("vllm.distributed.parallel_state").TensorMetadata
    pipeline = PipelineGroup(group, VllmWire(group, metadata, settings.config), Counter())
    pipeline.install()
    logger.info(
        "commlayer: rank %d of %d, in the engine's own format; replaced %s of the pipeline group; "
        "left to the engine: the broadcasts",
        group.rank_in_group,
        group.world_size,
        ", ".join(REPLACED),
    )
    return pipeline


def _shared_memory(group: Any) -> str:
    if getattr(group, "use_cpu_custom_send_recv", False):
        return " (and with them its synchronous shared-memory path)"
    return ""


def _refuse(unknown: seams.UnknownSeams) -> None:
    logger.error(
        "commlayer: this vLLM is not of a kind that commlayer-vllm knows, and is left as it is: "
        "%s.  Install a commlayer-vllm written for it, or unset %s and "
        'additional_config["commlayer"]',
        unknown,
        VARIABLE,
    )
