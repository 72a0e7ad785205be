"""Ranks in a job of a launcher: what it gives its own processes, they have."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
from commlayer_gloo import GlooBackend
from commlayer_testkit.conformance.lab import Lab
from commlayer_testkit.conformance.ranks import here
from commlayer_testkit.conformance.ranks.launcher import Launcher
from commlayer_testkit.conformance.ranks.pool import RankFailure, Ranks
from commlayer_testkit.conformance.rules import find_rule
from commlayer_testkit.conformance.runner import judge
from commlayer_testkit.conformance.subject import Subject
from commlayer_testkit.conformance.verdict import Outcome

from commlayer.errors import CommError, ErrorKind

LAUNCH = """
import os, subprocess, sys
size, program = int(sys.argv[1]), sys.argv[2:]
started = []
for rank in reversed(range(size)):
    read, write = os.pipe()
    os.write(write, b"job %d" % rank)
    os.set_inheritable(read, True)
    given = {"LAUNCHED_AS": str(rank), "LAUNCHED_FD": str(read)}
    started.append(subprocess.Popen(program, env={**os.environ, **given}, close_fds=False))
sys.exit(max(process.wait() for process in started))
"""


def launch(size: int) -> Sequence[str]:
    return [sys.executable, "-c", LAUNCH, str(size)]


def launched_as() -> int:
    return int(os.environ["LAUNCHED_AS"])


def what_was_given() -> tuple[int, int, bytes]:
    return here.rank(), here.world_size(), os.read(int(os.environ["LAUNCHED_FD"]), 100)


def end_with(code: int) -> None:
    sys.exit(code)


def hang() -> None:
    signal.pause()


@pytest.fixture(params=[True, False], ids=["forked", "fresh"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(fork=request.param, launcher=Launcher(launch, launched_as))
    yield ranks
    ranks.close()


def test_ranks_have_environment_descriptors_and_number_of_the_job(ranks: Ranks) -> None:
    assert ranks.run(what_was_given, 3, timeout=60) == [(n, 3, b"job %d" % n) for n in range(3)]


def test_exit_codes_and_deaths_are_those_of_the_ranks(ranks: Ranks) -> None:
    assert [process.wait(60) for process in ranks.spawn(end_with, 2, 7)] == [7, 7]
    first, victim = ranks.spawn(hang, 2)
    victim.signal(signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9"):
        victim.result()
    assert not first.ends(0)


def broken(size: int) -> Sequence[str]:
    return [sys.executable, "-c", "import sys; sys.exit('no slots')"]


def test_a_launcher_that_fails_is_quoted() -> None:
    ranks = Ranks(launcher=Launcher(broken, launched_as))
    with pytest.raises(RuntimeError, match=r"did not start 2 processes: it has ended\nno slots"):
        ranks.spawn(hang, 2)
    ranks.close()


class Launched(GlooBackend):
    name: ClassVar[str] = "launched"

    def launcher(self, size: int) -> Sequence[str]:
        return launch(size)


class WithoutLauncher(GlooBackend):
    name: ClassVar[str] = "without_launcher"

    def launcher(self, size: int) -> Sequence[str]:
        raise CommError(ErrorKind.PLUGIN, "launcher", "there is none", "install it")


@pytest.mark.parametrize("rule", ["L4-dead-peer", "L4-close-dead-peer"])
def test_no_rank_is_killed_in_a_job_that_would_end_with_it(rule: str) -> None:
    with Lab(Subject(Launched())) as lab:
        verdict = judge(find_rule(rule), lab)
    assert verdict.outcome is Outcome.NOT_APPLICABLE
    assert "ends with any rank that dies" in verdict.message


def test_without_its_launcher_a_rule_is_not_run() -> None:
    with Lab(Subject(WithoutLauncher())) as lab:
        verdict = judge(find_rule("L2-values"), lab)
    assert verdict.outcome is Outcome.NOT_RUN
    assert "install it" in verdict.message
