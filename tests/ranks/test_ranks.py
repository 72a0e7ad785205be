"""The harness itself: what it reports when ranks return, raise, hang, die or leave children."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time

import pytest
import torch

from ranks import here
from ranks.pool import RankFailure, Ranks, collect


def describe(scale: int) -> tuple[int, int, torch.Tensor]:
    return here.rank(), here.world_size(), torch.arange(3) * scale


def raise_on_rank_1() -> None:
    if here.rank() == 1:
        raise ValueError("bad luck")
    here.meet("never")


def hang_on_rank_1() -> None:
    if here.rank() == 1:
        here.say("there")
        time.sleep(1000)


def echo() -> None:
    print("listening")
    here.say(here.hear() + here.rank())


def end_with(code: int) -> None:
    sys.exit(code)


def leave_a_child() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    here.say(child)


def test_results_come_back_by_rank(ranks: Ranks) -> None:
    results = ranks.run(describe, 3, 2)
    assert [(rank, size) for rank, size, _ in results] == [(0, 3), (1, 3), (2, 3)]
    assert results[2][2].tolist() == [0, 2, 4]


def test_an_exception_names_the_rank_and_shows_its_traceback(ranks: Ranks) -> None:
    with pytest.raises(RankFailure, match=r"rank 1 raised(.|\n)*ValueError: bad luck"):
        ranks.run(raise_on_rank_1, 2)


def raise_one_after_another() -> None:
    if here.rank() == 0:
        here.hear()
        raise KeyError("the cause, met later")
    raise ValueError("bad luck")


def test_a_failure_soon_after_the_first_is_reported_with_it(ranks: Ranks) -> None:
    late, _ = processes = ranks.spawn(raise_one_after_another, 2)
    threading.Timer(0.2, late.say, ["go on"]).start()
    with pytest.raises(RankFailure, match=r"ValueError: bad luck(.|\n)*KeyError: 'the cause"):
        collect(processes)


def test_a_hang_names_the_rank_and_shows_its_stacks(ranks: Ranks) -> None:
    processes = ranks.spawn(hang_on_rank_1, 2)
    processes[1].hear()
    with pytest.raises(RankFailure, match=r"rank 1 does not come(.|\n)*in hang_on_rank_1"):
        collect(processes, timeout=1)


def test_a_killed_rank_is_a_failure(ranks: Ranks) -> None:
    _, victim = ranks.spawn(hang_on_rank_1, 2)
    victim.hear()
    victim.signal(signal.SIGKILL)
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9"):
        victim.result()


def test_talk_and_output(ranks: Ranks) -> None:
    processes = ranks.spawn(echo, 2)
    for process in processes:
        process.say(10)
    assert [process.hear() for process in processes] == [10, 11]
    assert [process.wait() for process in processes] == [0, 0]
    assert processes[0].output == "listening\n"


def test_exit_codes(ranks: Ranks) -> None:
    assert [process.wait() for process in ranks.spawn(end_with, 2, 7)] == [7, 7]


def test_children_of_ranks_do_not_survive_the_test(ranks: Ranks) -> None:
    (parent,) = ranks.spawn(leave_a_child, 1)
    child = parent.hear()
    exit_of_child = os.pidfd_open(child)
    ranks.end_processes()
    ended, _, _ = select.select([exit_of_child], [], [], 10)
    os.close(exit_of_child)
    assert ended
