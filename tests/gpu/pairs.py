"""The tests of two devices (tests/devices), as rows of the report."""

from __future__ import annotations

import os
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from gpu.report import FAILED, NOT_RUN, OK, SKIPPED, Row, show

TESTS = Path(__file__).resolve().parents[1] / "devices"


class _Rows:
    """A plugin of pytest that keeps how each test ended, and begins none after `deadline`."""

    def __init__(self, deadline: float) -> None:
        self.rows: list[Row] = []
        self._deadline = deadline

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._deadline:
            pytest.skip(NOT_RUN)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and not (report.failed or report.skipped):
            return
        said = report.longreprtext if report.failed else ""
        verdict = FAILED if report.failed else OK
        if report.skipped:
            said = str(report.longrepr[2]).removeprefix("Skipped: ")
            verdict = NOT_RUN if said == NOT_RUN else SKIPPED
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        self.rows.append(Row(name, verdict, report.duration, seen=said))
        show(self.rows[-1])


def run(limit: float) -> list[Row]:
    """Run them in this interpreter's environment, without its plugins of pytest."""
    found = _Rows(time.monotonic() + limit)
    # The settings of pyproject.toml are for plugins that a machine with devices may not have.
    arguments = ["-c", os.devnull, "--rootdir", str(TESTS.parent), "-p", "no:cacheprovider"]
    with redirect_stdout(sys.stderr):
        code = pytest.main([*arguments, "-p", "no:terminal", str(TESTS)], plugins=[found])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        found.rows.append(Row("tests of two devices", FAILED, 0, seen=f"pytest ended with {code}"))
    return found.rows
