"""Which policies are accepted on the word of which facts, and whose policy is used."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from commlayer_testkit.local import SERIALIZED, WAITED, Hub, LocalBackend, connect_rank, connected
from commlayer_testkit.ports import LOOPBACK, free_port
from msgspec.structs import replace
from torch import Tensor

from commlayer.bootstrap.connector import connect
from commlayer.config import CommConfig
from commlayer.errors import CommError, ErrorKind
from commlayer.handle import Handle
from commlayer.hooks import hookimpl
from commlayer.progress.operation import Operation
from commlayer.progress.policies import check_sound
from commlayer.progress.reaping import BackgroundReaping, reaping_policy
from commlayer.progress.retention import CopyOnPost, HoldReferences, retention_policy
from commlayer.registry import Registry
from commlayer.semantics import Completion, Poll, Semantics, SourceLifetime


def facts(**p2p: Any) -> Semantics:
    return replace(WAITED, p2p=replace(WAITED.p2p, **p2p))


class Copy:
    """An engine's own retention: everything is copied, and counted."""

    name = "engine_copy"
    requires: Any = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.seen = 0

    def retain(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        self.seen += len(tensors)
        return [tensor.clone() for tensor in tensors]


class Never:
    """An engine's own reaping: nothing is released before it is told."""

    name = "engine_never"
    requires: Any = {}  # noqa: RUF012
    background = True
    told = False

    def reapable(self, entries: Sequence[Operation]) -> int:
        return sum(entry.settled for entry in entries) if self.told else 0


class AsksThePoll(BackgroundReaping):
    """An engine's own reaping, which takes the word of the transport."""

    name = "poll"
    requires: Any = {"poll": {Poll.EXACT}}  # noqa: RUF012


class NeedsRecordStream(Copy):
    name = "recording"
    requires: Any = {"source_lifetime": {SourceLifetime.RECORD_STREAM}}  # noqa: RUF012


# Soundness


@pytest.mark.parametrize("poll", sorted(set(Poll) - {Poll.EXACT}))
def test_reaping_on_a_poll_that_is_not_exact_is_refused(poll: Poll) -> None:
    with pytest.raises(CommError) as caught:
        check_sound(AsksThePoll(), facts(poll=poll), "local")
    assert caught.value.kind is ErrorKind.CONFIG
    assert "p2p poll = EXACT" in caught.value.cause
    assert f"declares {poll.name}" in caught.value.cause
    assert "'poll'" in caught.value.operation
    assert "'local'" in caught.value.operation


def test_reaping_on_an_exact_poll_is_accepted() -> None:
    check_sound(AsksThePoll(), SERIALIZED, "local")


def test_every_allowed_value_is_named() -> None:
    class Matched(Copy):
        requires: Any = {"completion": {Completion.MATCHED, Completion.DELIVERED}}  # noqa: RUF012

    check_sound(Matched(), WAITED, "local")
    with pytest.raises(CommError, match=r"completion = DELIVERED or MATCHED.*declares LOCAL"):
        check_sound(Matched(), facts(completion=Completion.LOCAL), "local")


def test_a_fact_that_does_not_exist_is_an_error_of_the_policy() -> None:
    class Misspelt(Copy):
        requires: Any = {"pol": {Poll.EXACT}}  # noqa: RUF012

    with pytest.raises(CommError, match="no fact 'pol'"):
        check_sound(Misspelt(), WAITED, "local")


@pytest.mark.parametrize(
    ("choice", "fact"),
    [
        ({"reaping": AsksThePoll()}, "poll = EXACT, and the backend declares NEVER_BEFORE_WAIT"),
        ({"retention": NeedsRecordStream()}, "source_lifetime = RECORD_STREAM"),
    ],
)
def test_an_unsound_object_is_refused_when_connecting(choice: Any, fact: str) -> None:
    with pytest.raises(CommError, match=fact):
        connect_rank(Hub(1), 0, **choice)


def test_an_unsound_name_is_refused_before_the_other_ranks_hear_of_this_one() -> None:
    hub = Hub(1)
    with pytest.raises(CommError, match="policy 'gate_on_device' on backend 'local'"):
        connect_rank(hub, 0, reaping="gate_on_device")
    assert hub.store.items == {}


# By name


def test_names_select_policies() -> None:
    assert isinstance(retention_policy(CommConfig()), HoldReferences)
    assert retention_policy(CommConfig(retention="copy_on_post")).max_bytes == 0  # type: ignore[attr-defined]
    copying = retention_policy(CommConfig(retention="copy_on_post", copy_max_bytes=5))
    assert isinstance(copying, CopyOnPost)
    assert copying.max_bytes == 5
    for name in ("background", "fifo", "gate_on_device"):
        assert reaping_policy(CommConfig(reaping=name)).name == name


@pytest.mark.parametrize(
    ("key", "select", "known"),
    [
        (
            "retention",
            retention_policy,
            "hold_references, hold_until_event, copy_on_post",
        ),
        ("reaping", reaping_policy, "background, fifo, gate_on_device"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(key: str, select: Any, known: str) -> None:
    with pytest.raises(CommError, match=f"unknown {key} policy 'best'") as caught:
        select(CommConfig(**{key: "best"}))
    assert caught.value.kind is ErrorKind.CONFIG
    assert known in caught.value.cure


def test_copying_keeps_order_and_copies_all() -> None:
    small, large = torch.zeros(2), torch.zeros(100)
    first, second = CopyOnPost().retain([small, large])
    assert (first.numel(), second.numel()) == (2, 100)
    assert first.data_ptr() != small.data_ptr()
    assert second.data_ptr() != large.data_ptr()
    assert HoldReferences().retain([small])[0].data_ptr() == small.data_ptr()


# An engine's own objects


class Engine:
    """Supplies its policies by hook."""

    def __init__(self, retention: Any = None, reaping: Any = None) -> None:
        self.retention = retention
        self.reaping = reaping
        self.asked: list[tuple[Semantics, CommConfig]] = []

    @hookimpl
    def commlayer_retention_policy(self, semantics: Semantics, config: CommConfig) -> Any:
        self.asked.append((semantics, config))
        return self.retention

    @hookimpl
    def commlayer_reaping_policy(self, semantics: Semantics, config: CommConfig) -> Any:
        return self.reaping


def given(how: str, retention: Any, reaping: Any) -> dict[str, Any]:
    if how == "argument":
        return {"retention": retention, "reaping": reaping}
    registry = Registry(entry_points=[])
    registry.register(Engine(retention, reaping))
    return {"registry": registry}


@pytest.mark.parametrize("how", ["argument", "hook"])
def test_an_engines_retention_is_used(how: str) -> None:
    mine = Copy()
    with connected(**given(how, mine, None)) as (a, b):
        source = torch.zeros(5000)
        handles = [
            a.isend(source, 1),
            a.isend_tensor_dict({"x": source, "y": source[:4000]}, 1),
            a.broadcast(source, 0, async_op=True),
        ]
        source.fill_(1)
        assert b.recv(None, 0).sum() == 0
        assert [t.sum() for t in b.recv_tensor_dict(0).values()] == [0, 0]
        assert b.broadcast(None, 0).sum() == 0
        for handle in handles:
            handle.wait(30)
    assert mine.seen == 4


@pytest.mark.parametrize("how", ["argument", "hook"])
def test_an_engines_reaping_is_used(how: str) -> None:
    mine = Never()
    with connected(**given(how, None, mine)) as (a, b):
        source = torch.zeros(5000)
        alive = weakref.ref(source.untyped_storage())
        handle = a.isend(source, 1)
        del source
        b.recv(None, 0)
        handle.wait(30)
        gc.collect()
        assert alive() is not None
        assert [view.state for view in a.ledger.snapshot().operations] == ["complete"]
        mine.told = True
        a.ledger.reap()
        gc.collect()
        assert alive() is None
        assert a.ledger.snapshot().operations == ()


def test_a_hook_that_declines_leaves_the_configured_policy() -> None:
    registry = Registry(entry_points=[])
    engine = Engine()
    registry.register(engine)
    with connected(registry=registry) as (a, b):
        source = torch.zeros(5000)
        a.isend(source, 1)
        source.fill_(1)
        assert b.recv(None, 0).sum() == 5000
    assert engine.asked[0][0] == WAITED
    assert isinstance(engine.asked[0][1], CommConfig)


def test_the_argument_beats_the_hook() -> None:
    registry = Registry(entry_points=[])
    hooked, argued = Copy(), Copy()
    registry.register(Engine(hooked))
    with connected(registry=registry, retention=argued) as (a, b):
        receive = b.irecv(None, 0)
        a.send(torch.zeros(5000), 1)
        receive.wait(30)
    assert (hooked.seen, argued.seen) == (0, 1)


def test_an_unsound_policy_of_a_hook_is_refused() -> None:
    with pytest.raises(CommError, match="'recording' on backend 'local'"):
        connect_rank(Hub(1), 0, **given("hook", NeedsRecordStream(), None))


def test_connect_passes_an_engines_policy_on(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": LOOPBACK}
    for key, value in (environment | {"MASTER_PORT": str(free_port())}).items():
        monkeypatch.setenv(key, value)
    registry = Registry(entry_points=[])
    registry.add_backend(LocalBackend(Hub(1), WAITED))
    for policy in ({"retention": NeedsRecordStream()}, {"reaping": AsksThePoll()}):
        with pytest.raises(CommError, match="unsound"):
            connect({"backend": "local"}, registry=registry, **policy)  # type: ignore[arg-type]
    with connect({"backend": "local"}, registry=registry, retention=Copy()) as comm:
        assert comm.backend == "local"


class Broken:
    """A reaping policy with a defect."""

    name = "broken"
    requires: Any = {}  # noqa: RUF012
    background = True

    def reapable(self, entries: Sequence[Operation]) -> int:
        if any(entry.settled for entry in entries):
            raise ZeroDivisionError("a defect of the policy")
        return 0


def test_a_policy_that_raises_leaves_nobody_waiting() -> None:
    with connected(reaping=Broken()) as (a, b):
        receives = [b.irecv(None, 0) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            outcomes = [pool.submit(outcome, receive) for receive in receives]
            handles = [a.isend(torch.ones(5000), 1), a.isend(torch.ones(5000), 1)]
            outcomes += [pool.submit(outcome, handle) for handle in handles]
        assert ErrorKind.TIMEOUT not in [future.result() for future in outcomes]


def outcome(handle: Handle) -> ErrorKind | None:
    try:
        handle.wait(10)
    except CommError as error:
        return error.kind
    return None
