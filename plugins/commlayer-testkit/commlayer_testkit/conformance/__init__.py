"""The conformance kit: rules of the written contract, run against a backend.

Three equivalent ways to run it, all over the same rules:

- a class of three lines in the plugin's own tests::

      from commlayer_testkit.conformance import BackendConformance

      class TestMine(BackendConformance):
          backend = "mine"

- ``pytest --pyargs commlayer_testkit.conformance --commlayer-backend=mine``
- ``commlayer conformance mine``

Needs the extra ``commlayer[conformance]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer_testkit.conformance.clauses import Clause
    from commlayer_testkit.conformance.lab import Lab
    from commlayer_testkit.conformance.rules import Gate, Level, Rule, all_rules
    from commlayer_testkit.conformance.runner import judge
    from commlayer_testkit.conformance.subject import Subject
    from commlayer_testkit.conformance.suite import BackendConformance
    from commlayer_testkit.conformance.verdict import Outcome, Verdict

__all__ = [
    "BackendConformance",
    "Clause",
    "Gate",
    "Lab",
    "Level",
    "Outcome",
    "Rule",
    "Subject",
    "Verdict",
    "all_rules",
    "judge",
]

_MODULES = {
    "BackendConformance": "suite",
    "Lab": "lab",
    "Clause": "clauses",
    "Gate": "rules",
    "Level": "rules",
    "Outcome": "verdict",
    "Rule": "rules",
    "Subject": "subject",
    "Verdict": "verdict",
    "all_rules": "rules",
    "judge": "runner",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: ranks import this package too."""
    try:
        module = _MODULES[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
