"""The pytest plugin.  It does nothing unless ``--commlayer-backend`` or ``--commlayer-report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from commlayer_testkit.conformance.verdict import Verdict


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("commlayer", "conformance of a commlayer backend")
    group.addoption(
        "--commlayer-backend",
        metavar="NAME",
        help="backend that `--pyargs commlayer_testkit.conformance` is run against",
    )
    group.addoption(
        "--commlayer-level",
        metavar="LEVEL",
        default="L2",
        choices=["L0", "L1", "L2", "L3", "L4"],
        help="highest level that is run (default: L2)",
    )
    group.addoption(
        "--commlayer-deviations", metavar="FILE", help="TOML file of rules that are known to fail"
    )
    group.addoption(
        "--commlayer-schedules",
        metavar="N",
        type=int,
        default=200,
        help="most schedules of each simulated search (default: 200)",
    )
    group.addoption("--commlayer-report", metavar="FILE", help="write the certificate as JSON")


def pytest_configure(config: pytest.Config) -> None:
    backend = config.getoption("commlayer_backend")
    if backend:
        config.pluginmanager.register(_Run(config, backend), "commlayer-conformance-run")


class _Run:
    """One session that was asked for a backend."""

    def __init__(self, config: pytest.Config, backend: str) -> None:
        from commlayer_testkit.conformance.deviations import load
        from commlayer_testkit.conformance.subject import Subject

        self._backend = backend
        self._level = config.getoption("commlayer_level")
        self._report = config.getoption("commlayer_report")
        self._path = config.getoption("commlayer_deviations")
        self._worker = hasattr(config, "workerinput")
        rules = Subject(backend).rules() if self._path else []
        self._deviations = load(self._path, rules) if self._path else {}
        self._verdicts: list[Verdict] = []

    def pytest_pycollect_makeitem(self, collector: pytest.Module, name: str, obj: object) -> None:
        """Point the class of the kit itself at the backend that was asked for."""
        from commlayer_testkit.conformance.test_conformance import TestConformance

        if obj is TestConformance:
            TestConformance.backend = self._backend
            TestConformance.level = self._level
            TestConformance.deviations = str(Path(self._path).absolute()) if self._path else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        import msgspec

        from commlayer_testkit.conformance.suite import PROPERTY
        from commlayer_testkit.conformance.verdict import Verdict

        if report.when == "call":
            self._verdicts += [
                msgspec.json.decode(str(value), type=Verdict)
                for name, value in report.user_properties
                if name == PROPERTY
            ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker or not self._report:
            return
        from commlayer_testkit.conformance.report import certify
        from commlayer_testkit.conformance.rules import Level
        from commlayer_testkit.conformance.subject import Subject

        certificate = certify(
            Subject(self._backend), Level(self._level), self._verdicts, self._deviations
        )
        Path(self._report).write_bytes(certificate.encode())
