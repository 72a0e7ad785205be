"""From states of ranks to findings: which rank is named first, and what is not judged."""

from __future__ import annotations

import msgspec
import pytest

from commlayer.observe.diagnosis import diagnose
from commlayer.observe.report import REMEDIES, Case, Report
from commlayer.wire.rank_state import LaneState, PendingOperation, RankState, ThreadState


def operation(
    way: str, peer: int, *, number: int = 0, age: float = 9.0, awaited: bool = True, step: int = -1
) -> PendingOperation:
    kind = "isend" if way == "send" else "irecv"
    channel, tag = ("data", "0") if step < 0 else ("broadcast", "broadcast")
    return PendingOperation(kind, channel, tag, peer, way, number, step, 0, age, awaited, "a.py:1")  # type: ignore[arg-type]


def state(
    rank: int,
    *operations: PendingOperation,
    lanes: tuple[LaneState, ...] = (),
    steps: int = 0,
    call: str = "",
) -> RankState:
    threads = (ThreadState("MainThread", "b.py:2", call),) if call else ()
    return RankState(rank, "host", 1, operations, lanes, 0, (("broadcast", steps),), 0, threads)


def report(*states: RankState, size: int = 0, may_idle: tuple[str, ...] = ()) -> Report:
    return diagnose(
        {each.rank: each for each in states},
        name="test",
        rank=0,
        world_size=size or len(states),
        older_than=5.0,
        reason="asked for",
        may_idle=may_idle,
    )


def lane(way: str, peer: int, count: int, unclaimed: int = 0, seconds: float = 0.0) -> LaneState:
    return LaneState("data", "0", peer, way, count, unclaimed, seconds)  # type: ignore[arg-type]


def test_the_rank_at_the_end_of_a_chain_comes_first() -> None:
    made = report(state(0, operation("recv", 1)), state(1, operation("recv", 2)), state(2), size=3)
    assert [f.ranks for f in made.findings] == [(1, 2), (0, 1)]
    assert made.cycles == ()
    assert made.case is Case.NEVER_SENT


def test_a_silent_rank_at_the_end_of_a_chain_comes_first() -> None:
    made = report(state(0, operation("recv", 1, step=4)), state(1, operation("recv", 2)), size=3)
    assert made.silent == (2,)
    assert [f.case for f in made.findings] == [Case.PEER_SILENT, Case.BROADCAST_MISMATCH]


def test_a_rank_outside_a_circle_that_waits_for_it_is_a_consequence() -> None:
    made = report(
        state(0, operation("recv", 1)),
        state(1, operation("recv", 2)),
        state(2, operation("send", 1)),
    )
    assert made.cycles == ((1, 2),)
    assert made.findings[0].case is Case.CYCLE
    assert made.findings[-1].ranks == (0, 1)


def test_a_circle_comes_before_a_broadcast_that_it_keeps_a_rank_from() -> None:
    """Rank 1 waits for a broadcast that rank 0 calls once it has heard from rank 1."""
    made = report(
        state(0, operation("recv", 1), steps=3), state(1, operation("recv", 0, step=3), steps=4)
    )
    assert [f.case for f in made.findings] == [Case.CYCLE, Case.BROADCAST_MISMATCH]


def test_a_skipped_broadcast_without_a_circle_comes_first() -> None:
    made = report(state(0, steps=3), state(1, operation("recv", 0, step=3), steps=4))
    assert [f.case for f in made.findings] == [Case.BROADCAST_MISMATCH]


def test_a_source_that_has_gone_on_is_no_source() -> None:
    made = report(state(0, operation("recv", 1, step=0), steps=1), state(1, steps=1))
    assert [f.case for f in made.findings] == [Case.BROADCAST_SOURCE]
    assert made.findings[0].text == "ranks 0 and 1 name different sources for broadcast 0"


def test_a_broadcast_nobody_asks_for_after_as_many_calls_has_another_source() -> None:
    here = LaneState("broadcast", "broadcast", 0, "recv", 0, 1, 9.0)
    made = report(state(0, steps=2), state(1, lanes=(here,), steps=2))
    assert made.case is Case.BROADCAST_SOURCE
    made = report(state(0, steps=2), state(1, lanes=(here,), steps=1))
    assert made.case is Case.BROADCAST_MISMATCH


def test_receives_may_idle_where_that_is_said() -> None:
    waiting, other = state(0, operation("recv", 1)), state(1)
    assert report(waiting, other).case is Case.NEVER_SENT
    assert report(waiting, other, may_idle=("data",)).findings == ()
    assert report(waiting, size=2, may_idle=("data",)).findings == ()
    sent = state(1, lanes=(lane("send", 0, 1),))
    assert report(waiting, sent, may_idle=("data",)).case is Case.TRANSFER
    sender = state(1, operation("send", 0), lanes=(lane("send", 0, 1),))
    assert report(state(0), sender, may_idle=("data",)).case is Case.NEVER_RECEIVED


def test_both_sides_posted_is_a_matter_of_the_transport() -> None:
    made = report(
        state(0, operation("send", 1, number=3), lanes=(lane("send", 1, 4),)),
        state(1, operation("recv", 0, number=3), lanes=(lane("recv", 0, 4),)),
    )
    assert {w.missing for w in made.waits} == {"transfer"}
    assert made.case is Case.TRANSFER
    assert made.cycles == ()


def test_numbers_tell_which_message_is_missing() -> None:
    sent = state(1, lanes=(lane("send", 0, 3),))
    assert report(state(0, operation("recv", 1, number=2)), sent).waits[0].missing == "transfer"
    assert report(state(0, operation("recv", 1, number=3)), sent).waits[0].missing == "post"


def test_lanes_that_were_left_out_are_not_held_against_a_rank() -> None:
    other = msgspec.structs.replace(state(1), omitted=1)
    assert report(state(0, operation("recv", 1)), other).waits[0].missing == "transfer"


def test_what_is_young_is_listed_and_not_judged() -> None:
    made = report(state(0, operation("recv", 1, age=4.9)), state(1))
    assert made.findings == made.waits == ()
    assert made.case is None
    assert "nothing has waited for 5 s" in str(made)
    assert "4.9 s  irecv from rank 1" in str(made)


def test_operations_that_no_thread_waits_for_hold_no_rank_up() -> None:
    ahead = operation("recv", 1, awaited=False)
    made = report(state(0, ahead, operation("recv", 2)), state(1, operation("recv", 0)), state(2))
    assert made.cycles == ()
    assert made.findings[0].ranks == (0, 2)


def test_a_foreign_call_is_named_with_its_line() -> None:
    call = "torch.distributed.distributed_c10d.barrier()"
    made = report(state(0, operation("recv", 1)), state(1, call=call))
    assert made.case is Case.FOREIGN_CALL
    assert f"rank 1 is in {call} at b.py:2" in str(made)


@pytest.mark.parametrize("seconds", [9.0, 1.0])
def test_messages_that_nobody_asks_for(seconds: float) -> None:
    made = report(state(0), state(1, lanes=(lane("recv", 0, 2, 3, seconds),)))
    if seconds < 5:
        assert made.findings == ()
        return
    assert made.case is Case.NEVER_RECEIVED
    assert "rank 1 has not asked for 3 messages of rank 0" in str(made)


def test_a_peer_s_text_stays_on_its_line() -> None:
    hostile = msgspec.structs.replace(operation("recv", 1), site="x\nERROR: \x1b[31mforged")
    text = str(report(state(0, hostile), state(1)))
    assert "\x1b" not in text
    assert not any(line.startswith("ERROR") for line in text.splitlines())


def test_a_rank_that_does_not_exist_is_ignored() -> None:
    assert report(state(0, operation("recv", 77)), state(1)).findings == ()


def test_every_case_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Case)
