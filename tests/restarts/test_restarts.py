"""A job that torchrun restarts meets again at the first try; `make test-restarts` repeats it."""

from __future__ import annotations

import launching
import pytest


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "way", "victim", "moment"),
    [
        ("standalone", "environment", 0, "during"),
        ("static", "environment", 1, "raises"),
        ("c10d", "group", 0, "connected"),
        # The agents count their restarts apart, so that the ranks are told different counts.
        ("two agents", "environment", 1, "connected"),
    ],
)
def test_a_restarted_job_connects(how: str, way: str, victim: int, moment: str) -> None:
    outcome = launching.run(how, way, victim, moment)
    assert outcome.met, outcome.output
