"""Run the cases on this machine's GPU, or on the simulated device.

``python tests/gpu/run.py [--simulated] [--devices 2]``; needs no plugin of pytest and
no installed package of this repository.  With two devices the tests between them run
too.  Prints a table to standard error and one JSON object to standard output; exits
with 1 if anything did not end as expected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = (2, 11)
LIMIT = 240.0
"""Seconds after which no further case is begun, and no further test of two devices."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Test streams on a GPU")
    parser.add_argument("--simulated", action="store_true", help="do not look for a GPU")
    parser.add_argument("--devices", type=int, default=1, help="2: tests between two GPUs, too")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), *map(str, sorted(ROOT.glob("plugins/*")))]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    from gpu.report import say, show

    began = time.monotonic()
    reason = "asked for" if given.simulated else _no_device()
    if reason:
        say(f"No real device: {reason}. The same cases on the simulated device:")
    devices = _devices(real=not reason)
    say(f"{devices.title}\n")
    rows = []
    for row in _cases(devices):
        rows.append(row)
        show(row)
    if given.devices > 1:
        rows += _pairs(given.devices)
    right = all(row.right for row in rows)
    say(f"\n{'All as expected' if right else 'FAILED'}, {time.monotonic() - began:.0f} s")
    report = {
        "device": devices.title,
        "evidence": _evidence(reason),
        "right": right,
        "seconds": round(time.monotonic() - began, 1),
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(report, default=str), flush=True)
    if not right and not reason:
        os._exit(1)  # a case that hangs holds threads inside native code
    return int(not right)


def _no_device() -> str:
    """Why there is no real half; empty if there is one."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH:
        return f"torch {torch.__version__} is older than {'.'.join(map(str, TORCH))}"
    return ""


def _evidence(reason: str) -> str:
    from standin import controls

    if reason:
        return "simulated"
    return "real torch on a stand-in" if controls.loaded() else "real devices"


def _devices(*, real: bool) -> Any:
    if real:
        from gpu.real import RealDevice

        return RealDevice()
    from gpu.simulated import SimulatedDevices

    return SimulatedDevices()


def _cases(devices: Any) -> Iterator[Any]:
    from gpu.cases import CASES
    from gpu.report import FAILED, NOT_RUN, OK, SKIPPED, Row

    began = time.monotonic()
    for case in CASES:
        start = time.monotonic()
        if start - began > LIMIT:
            yield Row(case.name, NOT_RUN, 0, case.expected, f"{LIMIT:g} s are over")
            continue
        outcome = devices.run(case)
        verdict = SKIPPED if outcome.skipped else OK if outcome.passed else FAILED
        seconds = round(time.monotonic() - start, 2)
        yield Row(case.name, verdict, seconds, case.expected, outcome.seen, outcome.figures)


def _pairs(wanted: int) -> Any:
    import torch
    from gpu import pairs
    from gpu.report import NOT_RUN, Row, show

    found = torch.cuda.device_count()
    if found >= wanted:
        return pairs.run(LIMIT)
    row = Row("tests between two devices", NOT_RUN, 0, seen=f"{found} devices here")
    show(row)
    return [row]


if __name__ == "__main__":
    sys.exit(main())
