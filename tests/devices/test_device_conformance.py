"""The ``nccl`` backend under the conformance kit, up to two devices of one host."""

from __future__ import annotations

from commlayer_testkit.conformance.rules import Level
from commlayer_testkit.conformance.suite import BackendConformance


class TestNccl(BackendConformance):
    backend = "nccl"
    level = Level.L3
