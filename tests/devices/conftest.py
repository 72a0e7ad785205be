"""Tests of two devices: ``make test-gpu GPUS=2`` on real ones, ``make test-cuda`` without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


class _Absent(pytest.Module):
    def collect(self) -> list[pytest.Item]:  # type: ignore[override]
        pytest.skip("two CUDA devices are needed: make test-cuda, or make test-gpu GPUS=2")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Import no test module of this folder where there are no two devices."""
    if module_path.parent != HERE or torch.cuda.device_count() >= 2:
        return None
    return _Absent.from_parent(parent, path=module_path)
