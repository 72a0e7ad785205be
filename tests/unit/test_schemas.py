"""Which messages are named, which get a slot, and that a mixed stream does not thrash."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from frames import outgoing

from commlayer.errors import CommError, ErrorKind
from commlayer.wire.frame import EARNED_SLOTS, MAX_SCHEMAS, UNSLOTTED, Kind, Prefix
from commlayer.wire.message import Layout, SentSchemas
from commlayer.wire.reader import ReceivedSchemas

INLINE = 64


def layout(elements: int, count: int = 1, kind: Kind = Kind.TENSOR_DICT) -> Layout:
    return outgoing(kind, [torch.empty(elements)] * count, b"", INLINE).layout


def test_a_layout_is_described_twice_and_then_named() -> None:
    sent, small = SentSchemas(0), layout(2)
    first, second, third = (sent.plan(small, b"v") for _ in range(3))
    assert (first.schema, first.named) == (0, False)
    assert (second.schema, second.named) == (1, False)
    assert (third.schema, third.named, third.value) == (1, True, False)
    assert sent.plan(small, b"w") == (1, True, True, 0, 0)


def test_payload_that_repeats_gets_a_slot_where_the_receiver_has_some() -> None:
    for slots, expected in ((0, UNSLOTTED), (1, UNSLOTTED + 1), (EARNED_SLOTS, UNSLOTTED + 1)):
        sent, large = SentSchemas(slots), layout(100)
        assert sent.plan(large, b"").slot == UNSLOTTED
        assert sent.plan(large, b"").slot == expected
        assert sent.plan(large, b"").slot == expected


@pytest.mark.parametrize(
    "never",
    [layout(2), layout(100, kind=Kind.TENSOR), layout(1 << 21), layout(100, 65)],
    ids=["inline", "a tensor the receiver may bring", "large", "many"],
)
def test_what_never_gets_a_slot(never: Layout) -> None:
    sent = SentSchemas(EARNED_SLOTS)
    assert {sent.plan(never, b"").slot for _ in range(10)} == {UNSLOTTED if never.payload else 0}
    assert sent.in_use() == []


def test_slots_do_not_change_hands_in_a_stream_of_many_shapes() -> None:
    sent, shapes = SentSchemas(EARNED_SLOTS), [layout(100 + n) for n in range(100)]
    fillers = sum(sent.plan(shape, b"").fillers for _ in range(20) for shape in shapes)
    assert fillers == 0
    assert len(sent.in_use()) == EARNED_SLOTS


def test_a_slot_of_a_shape_that_no_longer_comes_goes_to_one_that_does() -> None:
    sent = SentSchemas(1)
    old, new = layout(100, 2), layout(200)
    for _ in range(5):
        assert sent.plan(old, b"").fillers == 0
    plans = [sent.plan(new, b"") for _ in range(60)]
    assert [plan.fillers for plan in plans if plan.fillers] == [2]
    assert plans[-1].slot == UNSLOTTED + 1
    assert sent.in_use() == [(UNSLOTTED + 1, 1)]
    assert sent.plan(old, b"").slot == UNSLOTTED


def test_decode_steps_keep_their_slot_among_prompts_of_all_lengths() -> None:
    sent, decode = SentSchemas(EARNED_SLOTS), layout(100, 2)
    slots: Counter[int] = Counter()
    for prompt in range(500):
        sent.plan(layout(200 + prompt % 250), b"")
        for _ in range(4):
            slots[sent.plan(decode, b"").slot] += 1
    assert slots.most_common(1)[0][1] >= 1998


def test_numbers_are_given_again_when_all_are_used() -> None:
    sent = SentSchemas(0)
    shapes = [layout(1000 + n) for n in range(MAX_SCHEMAS + 1)]
    numbers = [[sent.plan(shape, b"").schema for _ in range(2)][1] for shape in shapes]
    assert numbers == [*range(1, MAX_SCHEMAS + 1), 1]
    assert sent.plan(shapes[1], b"").named
    assert not sent.plan(shapes[0], b"").named


def prefix(**changed: int) -> Prefix:
    fields = {
        "kind": Kind.TENSOR_DICT, "flags": 0, "slot": 0, "sequence": 0, "step": -1, "schema": 1,
        "body": 0, "inline": 0, "checksum": 0, "seed": 0,
    }  # fmt: skip
    return Prefix(**(fields | changed))  # type: ignore[arg-type]


def test_a_schema_that_was_not_defined_cannot_be_named() -> None:
    with pytest.raises(CommError, match="names schema 1, not defined") as caught:
        ReceivedSchemas().named(prefix(), "receive")
    assert caught.value.kind is ErrorKind.PROTOCOL
