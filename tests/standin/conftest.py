"""Tests of CUDA's stand-in: ``make test-cuda`` runs them, where torch is loaded on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin import controls

HERE = Path(__file__).parent


class _Absent(pytest.Module):
    def collect(self) -> list[pytest.Item]:  # type: ignore[override]
        pytest.skip("CUDA's stand-in is not loaded here: make test-cuda")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Import no test module of this folder where torch does not run on the stand-in."""
    if module_path.parent != HERE or controls.loaded():
        return None
    return _Absent.from_parent(parent, path=module_path)
