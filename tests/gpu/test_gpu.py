"""The cases under pytest: on the GPU if there is one, else on the simulated device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.cases import CASES
from gpu.machine import Case


@pytest.fixture(scope="module")
def devices() -> Any:
    if torch.cuda.is_available():
        from gpu.real import RealDevice

        return RealDevice()
    pytest.importorskip("greenlet", reason="the simulator needs greenlet")
    from gpu.simulated import SimulatedDevices

    return SimulatedDevices(schedules=10)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(devices: Any, case: Case) -> None:
    outcome = devices.run(case)
    if outcome.skipped:
        pytest.skip(outcome.seen)
    assert outcome.passed, f"expected: {case.expected}\nseen: {outcome.seen}"
