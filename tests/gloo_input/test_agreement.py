"""Ranks that disagree, or are absent, are named before anything is opened."""

from __future__ import annotations

from typing import Any

import commlayer_gloo
import pytest
from msgspec.structs import replace
from ranks import here
from ranks.pool import Ranks

import commlayer
from commlayer import CommError, CommTimeout, ErrorKind
from commlayer.semantics import Completion


def disagree(settings: list[dict[str, Any]], named: list[str]) -> None:
    with pytest.raises(CommError) as caught:
        commlayer.connect({"backend": "gloo", **settings[here.rank()]})
    assert caught.value.kind is ErrorKind.CONFIG
    for text in (*named, "rank 0", "rank 1", "pid"):
        assert text in str(caught.value)
    here.meet("refused")
    with here.connect(name="again") as comm:
        comm.isend_object("well", 1 - comm.rank)
        assert comm.recv_object(1 - comm.rank) == "well"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([{"inline_bytes": 100}, {"inline_bytes": 200}], ["inline_bytes", "100", "200"]),
        ([{"allow_pickle": True}, {}], ["allow_pickle", "True", "False"]),
        ([{"channels": ("x",)}, {"channels": ("y",)}], ["channels", "'x'", "'y'"]),
    ],
)
def test_ranks_that_are_configured_differently(
    ranks: Ranks, settings: list[dict[str, Any]], named: list[str]
) -> None:
    ranks.run(disagree, 2, settings, named)


def other_facts() -> None:
    if here.rank() == 1:
        facts = commlayer_gloo.GlooBackend.semantics
        commlayer_gloo.GlooBackend.semantics = replace(
            facts, p2p=replace(facts.p2p, completion=Completion.DELIVERED)
        )
    with pytest.raises(CommError, match=r"facts\.p2p\.completion") as caught:
        commlayer.connect({"backend": "gloo"})
    assert "'matched'" in str(caught.value)
    assert "'delivered'" in str(caught.value)
    here.meet("refused")


def test_ranks_whose_plugins_declare_other_facts(ranks: Ranks) -> None:
    ranks.run(other_facts, 2)


def absent() -> None:
    if here.rank() != 1:
        with pytest.raises(CommTimeout, match=r"rank 1 of 3 did not connect within 0\.5 s"):
            commlayer.connect({"backend": "gloo", "connect_timeout": 0.5})
    here.meet("over")


def test_an_absent_rank_is_named(ranks: Ranks) -> None:
    ranks.run(absent, 3)
