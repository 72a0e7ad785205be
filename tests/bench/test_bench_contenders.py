"""What stands in for contenders that are not there."""

from __future__ import annotations

import sys

import pytest
from commlayer_bench.contender import Unavailable
from commlayer_bench.contenders import CONTENDERS

OPTIONAL = {"mpi4py": "mpi", "vllm": "vllm"}


@pytest.mark.parametrize(
    ("package", "name"),
    [(p, name) for p, prefix in OPTIONAL.items() for name in CONTENDERS if name.startswith(prefix)],
)
def test_a_package_that_is_missing_is_said(
    package: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unavailable):
        CONTENDERS[name](name)
