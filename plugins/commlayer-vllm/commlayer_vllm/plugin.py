"""The entry point: vLLM calls `register` in each of its processes.

Until commlayer is asked for, nothing but this and the settings is imported.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

from commlayer_vllm.settings import requested, settings_of

_MARK = "_commlayer"


def register() -> None:
    """Have commlayer installed once the engine has made its groups, if it is asked for then.

    May be called repeatedly.  The configuration is read when the groups are made:
    before, a worker does not know it.
    """
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    original = getattr(state, "initialize_model_parallel", None)
    if hasattr(original, _MARK):
        return
    if original is None:
        if requested({}, os.environ) is not None:
            logging.getLogger("vllm.commlayer").error(
                "commlayer: this vLLM makes its groups in a way that commlayer-vllm does not know, "
                "and is left as it is"
            )
        return

    @functools.wraps(original)
    def initialize_model_parallel(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        install_if_requested(state.get_pp_group())
        return result

    setattr(initialize_model_parallel, _MARK, True)
    state.initialize_model_parallel = initialize_model_parallel


def install_if_requested(group: Any) -> None:
    """Install on `group`, the pipeline group, if the engine's configuration asks for it."""
    engine = importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    table = requested(getattr(engine, "additional_config", None), os.environ)
    if table is None:
        return
    from commlayer_vllm.install import install

    platform = importlib.import_module("vllm.platforms").current_platform
    install(
        group,
        settings_of(
            table,
            platform.device_type,
            max_sequences=getattr(getattr(engine, "scheduler_config", None), "max_num_seqs", 0),
            draft_tokens=getattr(
                getattr(engine, "speculative_config", None), "num_speculative_tokens", 0
            )
            or 0,
        ),
    )
