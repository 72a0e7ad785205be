"""The README's example is run as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "pipeline.py"
    script.write_text(code)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    run = subprocess.run(
        [*launch, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    seen = sorted(re.findall(r"rank \d, step \d: \[\d, 1\]", run.stdout))
    assert seen == [
        f"rank {rank}, step {step}: [{step + 1}, 1]" for rank in range(2) for step in range(3)
    ], run.stdout
