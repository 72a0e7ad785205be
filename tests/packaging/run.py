"""Build every distribution, install the wheels alone into a new environment, and use them there.

Run by ``make test-wheels``; ``--build-only`` stops after ``make wheels``.  What is
run, and what it prints, goes to standard output and to build/wheels/transcript.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"
PROJECTS = [ROOT, *sorted(file.parent for file in ROOT.glob("plugins/*/pyproject.toml"))]
EXTRAS = {"commlayer": "[cli,conformance]"}


class Transcript:
    """Runs commands, and tells what was run and what it printed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")

    def say(self, text: str) -> None:
        text = text.replace(str(ROOT), ".")
        print(text, flush=True)
        print(text, file=self._file, flush=True)

    def run(self, *command: str | Path, cwd: Path = WORK, shown: int = 40, limit: int = 900) -> str:
        """What the command prints, its last `shown` lines told; ends the script if it fails."""
        self.say(f"$ {' '.join(map(str, command))}")
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.startswith("COMMLAYER_")
        }
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            env=environment | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
        if done.returncode:
            shown = 200
        for line in lines[len(lines) - min(shown, len(lines)) :]:
            self.say(f"  {line}")
        if done.returncode:
            raise SystemExit(f"exit code {done.returncode}: {' '.join(map(str, command))}")
        return done.stdout


def build(transcript: Transcript) -> list[Path]:
    """The wheels, built anew beside their source distributions."""
    shutil.rmtree(DIST, ignore_errors=True)
    for project in PROJECTS:
        transcript.run(
            sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, project, shown=1
        )
    return sorted(DIST.glob("*.whl"))


def install(transcript: Transcript, wheels: list[Path], torch: str) -> Path:
    """The folder of commands of a new environment that has the wheels and what they ask for."""
    shutil.rmtree(WORK / "venv", ignore_errors=True)
    venv.create(WORK / "venv", with_pip=True)
    commands = WORK / "venv" / "bin"
    wanted = [f"{wheel}{EXTRAS.get(wheel.name.split('-')[0], '')}" for wheel in wheels]
    transcript.run(
        commands / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "-c", ROOT / "constraints.txt", *wanted, f"torch=={torch}" if torch else "torch", "mypy",
        shown=3,
    )  # fmt: skip
    return commands


def use(transcript: Transcript, commands: Path, level: str) -> None:
    """What a user does first."""
    python = commands / "python"
    where = transcript.run(python, "-c", "import commlayer; print(commlayer.__file__)").strip()
    assert where.startswith(str(commands.parent)), where
    transcript.run(python, "-c", "import sys, torch; print(sys.version, torch.__version__)")
    transcript.run(commands / "commlayer", "--version")
    survey = transcript.run(commands / "commlayer", "backends")
    assert re.search(r"gloo +│ commlayer-gloo \S+ +│ yes", survey), survey
    transcript.run(commands / "commlayer", "conformance", "gloo", "--level", level, shown=12)
    transcript.run(commands / "commlayer", "sim", "explore", "exchange_one")
    readme = transcript.run(
        python,
        "-c",
        "from importlib.metadata import metadata; print(metadata('commlayer'))",
        shown=0,
    )
    example = re.search(r"```python\n(# pipeline\.py.*?)```", readme, flags=re.DOTALL)
    assert example is not None
    (WORK / "pipeline.py").write_text(example[1])
    printed = transcript.run(
        commands / "torchrun", "--nproc-per-node", "2", "--standalone", "pipeline.py"
    )
    seen = re.findall(r"rank \d, step \d: \[\d, 1\]", printed)
    assert len(seen) == 6, printed
    shutil.rmtree(WORK / "commlayer-my-fabric", ignore_errors=True)
    transcript.run(commands / "commlayer", "new-plugin", "my_fabric")
    check_types(transcript, python)


def check_types(transcript: Transcript, python: Path) -> None:
    """A client of the wheels, strictly, by both type checkers."""
    shutil.copy(Path(__file__).parent / "client.py", WORK)
    transcript.run(python, "-m", "mypy", "--strict", "client.py")
    (WORK / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "include": ["client.py"]})
    )
    pyright = Path(sys.executable).parent / "pyright"
    if pyright.exists():
        transcript.run(pyright, "--pythonpath", python, "client.py")
    else:
        transcript.say("pyright is not installed here: not run")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build-only", action="store_true", help="build, and install nothing")
    parser.add_argument("--torch", default="", help="version of torch (default: what pip finds)")
    parser.add_argument("--level", default="L1", help="level of the conformance run of gloo")
    arguments = parser.parse_args()
    transcript = Transcript(WORK / "transcript.txt")
    wheels = build(transcript)
    if not arguments.build_only:
        use(transcript, install(transcript, wheels, arguments.torch), arguments.level)
        transcript.say("all well")


if __name__ == "__main__":
    main()
