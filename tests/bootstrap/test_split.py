"""Communicators of some of the ranks, and barriers, without torch's groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ranks import here
from ranks.pool import Ranks, collect

from commlayer import CommError, CommTimeout, Communicator, ErrorKind


def exchange(comm: Communicator | None) -> Any:
    """Rank, size, and what every rank of the communicator says."""
    if comm is None:
        return None
    said = [
        comm.broadcast_object(here.rank() if comm.rank == src else None, src=src)
        for src in range(comm.world_size)
    ]
    return comm.rank, comm.world_size, said


def split_by_ranks() -> list[Any]:
    comm = here.connect()
    mine = [3, 1] if comm.rank in (1, 3) else np.array([0, 2])
    part = comm.split(mine)
    seen = [exchange(part), exchange(comm)]
    again = comm.split(mine, name="again")
    seen.append(exchange(again))
    assert again is not None
    assert again.config.name == "again"
    again.close()
    comm.close()
    seen.append(exchange(part))  # it lives on its own
    assert part is not None
    part.close()
    return seen


def test_ranks_make_a_communicator_numbered_as_they_say(ranks: Ranks) -> None:
    results = ranks.run(split_by_ranks, 4, timeout=90)
    parts = [(0, 2, [0, 2]), (1, 2, [3, 1]), (1, 2, [0, 2]), (0, 2, [3, 1])]
    for rank, seen in enumerate(results):
        assert seen == [parts[rank], (rank, 4, [0, 1, 2, 3]), parts[rank], parts[rank]]


def split_by_color() -> list[Any]:
    with here.connect() as comm:
        by_number = comm.split(color=comm.rank % 2)
        by_name = comm.split(color="ends" if comm.rank in (0, 3) else None)
        seen = [exchange(by_number), exchange(by_name)]
        for each in (by_number, by_name):
            if each is not None:
                each.close()
        return seen


def test_ranks_of_one_color_make_a_communicator(ranks: Ranks) -> None:
    results = ranks.run(split_by_color, 4, timeout=90)
    assert [seen[0] for seen in results] == [
        (0, 2, [0, 2]),
        (0, 2, [1, 3]),
        (1, 2, [0, 2]),
        (1, 2, [1, 3]),
    ]
    assert [seen[1] for seen in results] == [(0, 2, [0, 3]), None, None, (1, 2, [0, 3])]


def split_of_split() -> Any:
    with here.connect() as comm:
        half = comm.split(color=comm.rank // 2)
        assert half is not None
        alone = half.split([half.rank])
        pair = half.split([1, 0])
        seen = exchange(alone), exchange(pair)
        for each in (alone, pair, half):
            assert each is not None
            each.close()
        return seen


def test_a_part_can_be_split_again(ranks: Ranks) -> None:
    results = ranks.run(split_of_split, 4, timeout=90)
    pairs = [[1, 0], [1, 0], [3, 2], [3, 2]]
    for rank, (alone, pair) in enumerate(results):
        assert alone == (0, 1, [rank])
        assert pair == (1 - rank % 2, 2, pairs[rank])


def disagree() -> str:
    comm = here.connect(connect_timeout=10.0)
    lists = [[0, 1], [0, 1, 2], [0, 1, 2]]
    with pytest.raises(CommError) as caught:
        comm.split(lists[comm.rank])
    here.meet("refused")
    comm.close()
    assert caught.value.kind in (ErrorKind.CONFIG, ErrorKind.TIMEOUT)
    return str(caught.value)


def test_ranks_that_list_different_members_are_told_so(ranks: Ranks) -> None:
    texts = ranks.run(disagree, 3, timeout=90)
    assert "connects with ranks 0,1 and waits for rank 1" in texts[0]
    assert "which connects with ranks 0,1,2 instead" in texts[0]
    for text in texts[1:]:
        assert "rank 0" in text


def wrong_arguments() -> None:
    with here.connect() as comm:
        me, other = comm.rank, 1 - comm.rank
        for ranks, named in (
            ([other], "is not among"),
            ([me, me], "names a rank twice"),
            ([me, 2], "2 is no rank of this communicator of 2"),
            ([me, -1], "-1 is no rank"),
            ([me, "1"], "'1' is not an integer"),
            ([me, True], "True is not an integer"),
            (3, "are no ranks"),
        ):
            with pytest.raises(CommError, match=named) as caught:
                comm.split(ranks)  # type: ignore[arg-type]
            assert caught.value.kind is ErrorKind.CONFIG
        for color in (1.5, True, b"x"):
            with pytest.raises(CommError, match="is not an integer"):
                comm.split(color=color)  # type: ignore[arg-type]
    with pytest.raises(CommError) as caught:
        comm.split([me])
    assert caught.value.kind is ErrorKind.CLOSED
    with pytest.raises(CommError):
        comm.barrier()


def test_a_wrong_list_or_color_is_named(ranks: Ranks) -> None:
    ranks.run(wrong_arguments, 2)


def barriers(count: int) -> list[int]:
    """How many ranks had come when this one left, for each barrier."""
    with here.connect() as comm:
        store, left = here.store(), []
        for number in range(count):
            store.add(f"come {number}", 1)
            comm.barrier()
            left.append(store.add(f"come {number}", 0))
        comm.channel("control").barrier(30)
        return left


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_rank_leaves_a_barrier_before_every_rank_has_come(ranks: Ranks, size: int) -> None:
    assert ranks.run(barriers, size, 20, timeout=60) == [[size] * 20] * size


def late_for_a_barrier() -> None:
    with here.connect() as comm:
        if comm.rank == 2:
            here.hear()
        else:
            with pytest.raises(CommTimeout, match="barrier"):
                comm.barrier(0.2)
            here.say("too long")
        comm.barrier(30)
        comm.barrier(30)
        assert comm.broadcast_object(comm.rank, src=2) == 2


def test_a_barrier_that_takes_too_long_goes_on(ranks: Ranks) -> None:
    first, second, late = processes = ranks.spawn(late_for_a_barrier, 3)
    for process in (first, second):
        assert process.hear() == "too long"
    late.say("come")
    collect(processes)
