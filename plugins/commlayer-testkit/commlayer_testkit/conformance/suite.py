"""The kit as a pytest class."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from commlayer.backend import Backend
from commlayer_testkit.conformance.deviations import Deviations, complaint, load
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.rules import Level, Rule
from commlayer_testkit.conformance.runner import judge
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.conformance.verdict import Outcome

PROPERTY = "commlayer verdict"
"""Name of the pytest property that carries a verdict, whichever process judged."""


class BackendConformance:
    """Subclass it as ``class TestMine(BackendConformance): backend = "mine"``.

    `backend` is the name of an installed backend, a backend object or a
    `Subject`; `level` the highest level that is run; `deviations` a file beside
    the module of the class.
    """

    backend: ClassVar[str | Backend | Subject] = ""
    level: ClassVar[Level | str] = Level.L2
    deviations: ClassVar[str | None] = None

    _schedules: ClassVar[int] = 200
    _bench: ClassVar[Lab]
    _deviations: ClassVar[Deviations]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        type(self)._schedules = metafunc.config.getoption("commlayer_schedules", 200)
        if "rule" in metafunc.fixturenames:
            rules = self._subject().rules(Level(self.level)) if self.backend else []
            metafunc.parametrize("rule", rules, ids=[rule.id for rule in rules])

    @classmethod
    def _subject(cls) -> Subject:
        return cls.backend if isinstance(cls.backend, Subject) else Subject(cls.backend)

    @classmethod
    def setup_class(cls) -> None:
        cls._bench = Lab(cls._subject(), schedules=cls._schedules)
        cls._deviations = {}
        if cls.deviations is not None:
            file = Path(inspect.getfile(cls)).parent / cls.deviations
            cls._deviations = load(file, cls._bench.subject.rules())

    @classmethod
    def teardown_class(cls) -> None:
        cls._bench.close()

    def test_rule(self, rule: Rule, record_property: Any) -> None:
        """One rule, judged; a deviation is expected to fail."""
        verdict = judge(rule, self._bench)
        record_property(PROPERTY, msgspec.json.encode(verdict).decode())
        deviation = self._deviations.get(rule.id)
        error = complaint(verdict, deviation)
        if error:
            pytest.fail(f"{rule.clause.text}\n{error}", pytrace=False)
        if verdict.outcome is Outcome.FAILED and deviation is not None:
            pytest.xfail(f"{deviation.kind.value}: {deviation.reason} ({deviation.issue})")
        if verdict.outcome is not Outcome.PASSED:
            pytest.skip(f"{verdict.outcome.value}: {verdict.message}")
