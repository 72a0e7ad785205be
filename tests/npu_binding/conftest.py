"""Tests on the real binding of torch_npu: ``make test-npu-binding`` installs it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class _Absent(pytest.Module):
    def collect(self) -> list[pytest.Item]:  # type: ignore[override]
        pytest.skip("torch_npu is not installed here: make test-npu-binding")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Import no test module of this folder where torch_npu is absent."""
    if module_path.parent != HERE or importlib.util.find_spec("torch_npu") is not None:
        return None
    return _Absent.from_parent(parent, path=module_path)
