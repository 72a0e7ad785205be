"""The loops of the page on embedding are run as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/embedding.md").read_text()
SCRIPTS = {
    re.match(r"# (\w+)\.py", code).group(1): code  # type: ignore[union-attr]
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
}


def run(name: str, folder: Path) -> list[str]:
    """What the script of that name prints on two ranks, in the order of the ranks."""
    script = folder / f"{name}.py"
    script.write_text(SCRIPTS[name])
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"rank \d: [^r]*", done.stdout.replace("\n", "")))


def test_micro_batches_in_flight(tmp_path: Path) -> None:
    # Each of three steps of a slot adds 1 on both stages to 8 columns, and sums them.
    sampled = 0.0
    for _ in range(3):
        sampled = 8 * (sampled + 2)
    lines = [f"rank {rank}: {[sampled] * 4}" for rank in range(2) for _ in range(2)]
    assert run("event_loop", tmp_path) == lines


def test_forward_and_backward(tmp_path: Path) -> None:
    first, second = run("one_forward_one_backward", tmp_path)
    # Gradients of sum((x @ w) @ w), of four micro-batches of 4 rows of i = 0..3.
    rows = 4 * (0 + 1 + 2 + 3)
    assert first == f"rank 0: {8 * 8 * rows * 8 * 0.01:.4f}"
    assert second == f"rank 1: {8 * 8 * rows * 8 * 0.01:.4f}"


def test_no_other_script_is_shown() -> None:
    assert sorted(SCRIPTS) == ["event_loop", "one_forward_one_backward"]


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", PAGE))))
def test_the_linked_pages_exist(link: str) -> None:
    assert (ROOT / "docs" / link).exists()
