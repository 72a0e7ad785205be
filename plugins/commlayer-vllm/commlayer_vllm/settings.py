"""What the user configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind

VARIABLE = "COMMLAYER_VLLM"
KEY = "commlayer"

CHANNELS = ("tokens", "counts", "drafts")
"""Channels of the broadcasts."""

# ROCm builds of torch and of the engine call their devices "cuda".
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "oneccl", "npu": "npu"}
_OFF = {"", "0", "false", "no", "off"}
_FORMATS = ("commlayer", "vllm")


@dataclass(frozen=True)
class Settings:
    """The plugin's own settings, and those of the communicator.

    `wire_format` is ``commlayer``, or ``vllm`` for the engine's own format, which
    a rank without the plugin understands.  `max_sequences` and `draft_tokens`
    bound the broadcasts and are the engine's own numbers (0: not known).
    """

    wire_format: Literal["commlayer", "vllm"]
    config: CommConfig
    max_sequences: int = 0
    draft_tokens: int = 0


def requested(additional_config: Any, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The user's table, or ``None`` where the plugin is not asked for.

    ``additional_config["commlayer"]`` is a table (an empty one enables), True or
    False; without it ``COMMLAYER_VLLM`` decides.  Raises `CommError` (CONFIG).
    """
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        return None if environ.get(VARIABLE, "").strip().lower() in _OFF else {}
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, Mapping):
        raise _invalid(f"expected a table, true or false, got {type(given).__name__}")
    return dict(given)


def settings_of(
    table: Mapping[str, Any],
    platform: str,
    *,
    environ: Mapping[str, str] | None = None,
    max_sequences: int = 0,
    draft_tokens: int = 0,
) -> Settings:
    """Complete the user's `table` for an engine that runs on `platform`.

    `platform` is the device type of the engine's platform.  All keys but
    ``wire_format`` are those of `CommConfig`.  Raises `CommError` (CONFIG).
    """
    keys = dict(table)
    wire_format = keys.pop("wire_format", "commlayer")
    if wire_format not in _FORMATS:
        raise _invalid(f"wire_format is {wire_format!r}; known: {', '.join(_FORMATS)}")
    config = CommConfig.load(keys, environ=environ)
    if wire_format == "vllm" and not config.allow_pickle:
        raise CommError(
            ErrorKind.CONFIG,
            'wire_format = "vllm"',
            "the engine's own format has pickled metadata: a peer can run code here",
            "Say allow_pickle = true where every rank is trusted",
        )
    config = msgspec.structs.replace(
        config.with_channels(CHANNELS), backend=_backend(config.backend, platform)
    )
    return Settings(wire_format, config, max_sequences, draft_tokens)


def _backend(configured: str, platform: str) -> str:
    if configured != "auto":
        return configured
    try:
        return _BACKENDS[platform]
    except KeyError:
        raise _invalid(
            f"no backend is known for platform {platform!r}", 'Name one: {"backend": "gloo"}'
        ) from None


def _invalid(cause: str, cure: str = "") -> CommError:
    return CommError(ErrorKind.CONFIG, f'additional_config["{KEY}"]', cause, cure)
