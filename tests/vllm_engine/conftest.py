"""Tests inside the engine itself: ``make test-vllm`` runs them, where vLLM is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks.pool import Ranks

HERE = Path(__file__).parent


class _Absent(pytest.Module):
    def collect(self) -> list[pytest.Item]:  # type: ignore[override]
        pytest.skip("vLLM is not installed here: make test-vllm")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Import no test module of this folder where the engine is absent."""
    if module_path.parent != HERE or importlib.util.find_spec("vllm") is not None:
        return None
    return _Absent.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def _engine_ranks() -> Iterator[Ranks]:
    from commlayer_testkit.conformance.ranks import pool

    ranks = pool.Ranks(
        [
            "pytest",
            "commlayer_gloo",
            "vllm.v1.worker.gpu_worker",
            "vllm.v1.worker.gpu_model_runner",
            "vllm.v1.worker.gpu.pp_utils",
        ]
    )
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(_engine_ranks: Ranks) -> Iterator[Ranks]:
    """As the fixture of all tests, with the engine imported already."""
    yield _engine_ranks
    _engine_ranks.end_processes()
