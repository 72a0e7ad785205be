"""The hooks by which plugins and engines extend commlayer (pluggy, project name ``commlayer``).

Hooks run while connecting and while reporting; on the data path none is called but
`commlayer_event`, and that where a plugin implements it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from commlayer import observe
    from commlayer.backend import Backend
    from commlayer.config import CommConfig
    from commlayer.progress.reaping import ReapingPolicy
    from commlayer.progress.retention import RetentionPolicy
    from commlayer.semantics import Semantics

PROJECT = "commlayer"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Decorator for the implementations in a plugin module."""


class Hooks:
    """Signatures of all hooks."""

    @hookspec
    def commlayer_backend(self) -> Backend:  # type: ignore[empty-body]
        """Return the backend that this module provides.  Called once, when it is first selected."""

    @hookspec(firstresult=True)
    def commlayer_retention_policy(
        self, semantics: Semantics, config: CommConfig
    ) -> RetentionPolicy | None:
        """Return a retention policy to use instead of the configured one, or ``None``."""

    @hookspec(firstresult=True)
    def commlayer_reaping_policy(
        self, semantics: Semantics, config: CommConfig
    ) -> ReapingPolicy | None:
        """Return a reaping policy to use instead of the configured one, or ``None``."""

    @hookspec(firstresult=True)
    def commlayer_configure(self, config: CommConfig) -> CommConfig | None:
        """Return a replacement for the configuration, before a backend is chosen, or ``None``."""

    @hookspec
    def commlayer_event(self, event: observe.events.Event) -> None:
        """Be told what happens to operations, and of stall reports.

        `event` is an `OperationEvent` or a `StallEvent`.  Called on any thread, for
        every operation of every connection that was made while a plugin implements
        it, under locks of the library's: be quick, call nothing of commlayer.
        What it raises is logged.
        """
