"""Runs of the engine, each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class EngineRuns:
    """Runs plans of `engine` with one small model, in `folder`; one engine at a time."""

    def __init__(self, folder: Path, layers: int = 8) -> None:
        self._folder = folder
        self._model = folder / "model"
        subprocess.run(
            [sys.executable, HERE / "small_model.py", self._model, str(layers)],
            check=True,
            capture_output=True,
            timeout=300,
        )
        self._plugin = folder / "plugin"
        information = self._plugin / "without_shared_memory-0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Name: without-shared-memory\nVersion: 0\n")
        (information / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nwithout_shared_memory = engine_worker:without_shared_memory\n"
        )

    def __call__(
        self, *, shared_memory: bool = True, timeout: float = 900, **plan: Any
    ) -> tuple[dict[str, Any], str]:
        """The result of the plan and everything that the engine printed."""
        path = [HERE, *([] if shared_memory else [self._plugin]), os.environ.get("PYTHONPATH")]
        plan = {"model": str(self._model), **plan}
        process = subprocess.Popen(
            [sys.executable, HERE / "engine.py", json.dumps(plan)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(str(part) for part in path if part)},
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            _end(process.pid)
        for line in reversed(output.splitlines()):
            if line.startswith('{"tokens"'):
                return json.loads(line), output
        raise AssertionError(f"the engine gave no result\n{output[-8000:]}")


def _end(session: int) -> None:
    """Kill what a run has left in its process group."""
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        pass
