"""A program that uses commlayer is checked by mypy as its author would check it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent / "client.py"


def mypy(program: Path) -> subprocess.CompletedProcess[str]:
    """Check `program` strictly, from a folder without configuration of ours."""
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ".cache", program.name],
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=110,
        env=environment,
    )


def test_a_right_program_passes_and_wrong_calls_are_named(tmp_path: Path) -> None:
    program = tmp_path / "client.py"
    program.write_text(CLIENT.read_text())
    right = mypy(program)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import commlayer\n"
        "comm = commlayer.connect(3)\n"
        'comm.isend("text", 1)\n'
        "comm.irecv(None, 1).wait(timeout='soon')\n"
        "print(comm.rank + 'x')\n"
    )
    refused = mypy(wrong)
    named = {int(line.split(":")[1]) for line in refused.stdout.splitlines() if ": error:" in line}
    assert named == {2, 3, 4, 5}, refused.stdout
