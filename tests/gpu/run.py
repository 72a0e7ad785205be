"""Run the cases on this machine's GPU, or on the simulated device, and print a table.

``python tests/gpu/run.py [--simulated]``; needs no plugin of pytest and no
installed package of this repository.  Exits with 1 if a case did not end as expected.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = (2, 11)
LIMIT = 270.0
"""Seconds after which no further case is begun."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Test streams on one GPU")
    parser.add_argument("--simulated", action="store_true", help="do not look for a GPU")
    simulated = parser.parse_args().simulated
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, sorted(ROOT.glob("plugins/*")))]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    reason = "asked for" if simulated else _no_device()
    if reason:
        print(f"No real device: {reason}. The same cases on the simulated device:")
    else:
        print("The real device:")
    failed = _run(_devices(real=not reason))
    sys.stdout.flush()
    if failed and not reason:
        os._exit(1)  # a case that hangs holds threads inside native code
    return int(failed)


def _no_device() -> str:
    """Why there is no real half; empty if there is one."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, TORCH))}"
    return ""


def _devices(*, real: bool) -> Any:
    if real:
        from gpu.real import RealDevice

        return RealDevice()
    from gpu.simulated import SimulatedDevices

    return SimulatedDevices()


def _run(devices: Any) -> bool:
    from gpu.cases import CASES

    print(f"{devices.title}\n")
    began = time.monotonic()
    failed = False
    for case in CASES:
        if time.monotonic() - began > LIMIT:
            print(f"not run  {case.name}: {LIMIT:g} s are over")
            failed = True
            continue
        start = time.monotonic()
        outcome = devices.run(case)
        failed |= not outcome.passed
        verdict = "skipped" if outcome.skipped else "ok" if outcome.passed else "FAILED"
        figures = ", ".join(f"{name} {value}" for name, value in outcome.figures.items())
        _row(verdict, case.name, f"{time.monotonic() - start:.1f} s")
        _row("", "expected", case.expected)
        _row("", "seen", outcome.seen)
        if figures:
            _row("", "figures", figures)
    print(f"\n{'FAILED' if failed else 'All as expected'}, {time.monotonic() - began:.0f} s")
    return failed


def _row(verdict: str, name: str, text: str) -> None:
    width = 44 if verdict else 10
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, 88)] or [""]
    print(f"{verdict:<9}{name:<{width}}{lines[0]}")
    for line in lines[1:]:
        print(f"{'':<{9 + width}}{line}")


if __name__ == "__main__":
    sys.exit(main())
