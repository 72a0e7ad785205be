"""The hooks that the kit adds to those of the library, for plugins and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from commlayer.hooks import hookspec

if TYPE_CHECKING:
    from commlayer.semantics import Semantics
    from commlayer_testkit.conformance.rules import Rule


class KitHooks:
    """Signatures of the kit's hooks."""

    @hookspec
    def commlayer_conformance_rules(self, semantics: Semantics) -> list[Rule]:  # type: ignore[empty-body]
        """Return rules that the conformance kit runs beside its own, whose ids no other rule has.

        Called before each run of the kit against the backend whose facts are `semantics`.
        """
