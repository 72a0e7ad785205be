"""What ``pytest --pyargs commlayer_testkit.conformance --commlayer-backend=NAME`` collects."""

from __future__ import annotations

from commlayer_testkit.conformance.suite import BackendConformance


class TestConformance(BackendConformance):
    """Every rule, against the backend that the option names."""
