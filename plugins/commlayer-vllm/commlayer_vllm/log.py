"""The log of the engine."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.commlayer")
"""Below the engine's own logger, which has the handlers and the level."""


def show_library_log() -> None:
    """Let the library's own logger write where the engine's does."""
    library = logging.getLogger("commlayer")
    if not library.handlers:
        for handler in logging.getLogger("vllm").handlers:
            library.addHandler(handler)
        library.propagate = not library.handlers
