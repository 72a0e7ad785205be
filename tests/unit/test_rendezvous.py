"""Who connects with whom, and what ranks that disagree are told."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from local import SERIALIZED, WAITED, Hub, LocalBackend, MemoryStore, connect_rank, on_every_rank
from msgspec.structs import replace

from commlayer.backend import World
from commlayer.bootstrap.rendezvous import (
    Hello,
    agree,
    world_of_environment,
    world_of_group,
    world_of_job,
)
from commlayer.config import CommConfig
from commlayer.errors import CommError, CommTimeout, ErrorKind
from commlayer.progress.runtime import ThreadRuntime
from commlayer.semantics import Completion

HELLO = Hello(
    wire_version=2,
    backend="local",
    channels=("data",),
    inline_bytes=64,
    allow_pickle=False,
    facts=WAITED,
    headers_ahead=2,
    payloads_ahead=6,
    version="1.0",
    host="here",
    pid=1,
)


def outcomes(*hellos: Hello) -> list[Any]:
    """What each rank learns from the hellos of all."""
    hub = Hub(len(hellos))

    def body(rank: int) -> Any:
        try:
            agree(World(rank, hub.size, hub.store, 20.0), hellos[rank], ThreadRuntime())
        except CommError as error:
            return error
        return None

    return on_every_rank(hub, body)


def test_equal_ranks_agree_wherever_they_run() -> None:
    assert outcomes(HELLO, replace(HELLO, host="there", pid=2, version="1.1")) == [None, None]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"inline_bytes": 65}, ["inline_bytes", "64", "65"]),
        ({"wire_version": 3}, ["wire_version", "2", "3"]),
        ({"backend": "other"}, ["backend", "'local'", "'other'"]),
        ({"allow_pickle": True}, ["allow_pickle", "False", "True"]),
        ({"channels": ("data", "x")}, ["channels", "('data',)", "('data', 'x')"]),
        ({"facts": SERIALIZED}, ["facts.p2p.poll", "never_before_wait", "exact"]),
        (
            {"facts": replace(WAITED, p2p=replace(WAITED.p2p, completion=Completion.LOCAL))},
            ["facts.p2p.completion", "matched", "local"],
        ),
    ],
)
def test_what_differs_is_named_on_both_ranks_with_both_values(
    changed: dict[str, Any], named: list[str]
) -> None:
    for error in outcomes(HELLO, replace(HELLO, host="there", pid=2, **changed)):
        assert error.kind is ErrorKind.CONFIG
        for text in (*named, "rank 0", "rank 1", "pid 1 on here", "pid 2 on there"):
            assert text in str(error)


def test_the_rank_that_differs_is_found_among_several() -> None:
    errors = outcomes(HELLO, HELLO, replace(HELLO, inline_bytes=1))
    assert all("rank 2" in str(error) for error in errors)


def test_absent_ranks_are_named() -> None:
    hub = Hub(4)
    hub.store.set("hello/2", b"")
    with pytest.raises(CommTimeout, match=r"rank 1, 3 of 4 did not connect within 0\.01 s"):
        agree(World(0, 4, hub.store, 0.01), HELLO, ThreadRuntime())


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"wire_version": 1})])
def test_a_hello_of_another_kind_of_version_is_an_error_that_names_the_rank(data: bytes) -> None:
    store = MemoryStore()
    store.set("hello/1", data)
    with pytest.raises(CommError, match=r"rank 1 .* greet each other differently"):
        agree(World(0, 2, store, 5.0), HELLO, ThreadRuntime())


def test_a_rank_of_the_version_before_is_refused_naming_both_hosts_and_versions() -> None:
    """Wire version 1 said this hello; a build of it was also tried by hand."""
    before = msgspec.structs.asdict(replace(HELLO, wire_version=1, host="elsewhere", pid=7))
    del before["headers_ahead"], before["payloads_ahead"]
    hub = Hub(2)
    hub.store.set("hello/1", msgspec.msgpack.encode(before))
    with pytest.raises(CommError) as caught:
        agree(World(0, 2, hub.store, 20.0), HELLO, ThreadRuntime())
    assert caught.value.kind is ErrorKind.CONFIG
    for fact in ("pid 1 on here", "pid 7 on elsewhere", "wire version 1", "wire version 2"):
        assert fact in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ([{"inline_bytes": 100}, {"inline_bytes": 200}], "inline_bytes: (100|200) and (100|200)"),
        ([{}, {"allow_pickle": True}], "allow_pickle"),
        ([{}, {"channels": ("extra",)}], "channels"),
        ([{}, {"semantics": SERIALIZED}], r"facts\.p2p\.poll"),
    ],
)
def test_ranks_that_disagree_do_not_connect(settings: list[Any], named: str) -> None:
    hub = Hub(2)

    def body(rank: int) -> None:
        with pytest.raises(CommError, match=named) as caught:
            connect_rank(hub, rank, **settings[rank])
        assert caught.value.kind is ErrorKind.CONFIG

    on_every_rank(hub, body)
    assert hub.posted.total() == 0


def test_the_order_in_which_channels_are_named_does_not_matter() -> None:
    hub = Hub(2)
    names = [("x", "y"), ("y", "x")]

    def body(rank: int) -> Any:
        with connect_rank(hub, rank, channels=names[rank]) as comm:
            comm.channel("x").isend_object(f"x of {rank}", 1 - rank)
            comm.channel("y").isend_object(f"y of {rank}", 1 - rank)
            return comm.channel("y").recv_object(1 - rank), comm.channel("x").recv_object(1 - rank)

    assert on_every_rank(hub, body) == [("y of 1", "x of 1"), ("y of 0", "x of 0")]


ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"RANK": None}, "RANK not set"),
        ({"RANK": None, "MASTER_PORT": None}, "RANK, MASTER_PORT not set"),
        ({"RANK": "one"}, "RANK = 'one' is not a number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = '' is not a number"),
        ({"RANK": "2"}, "RANK = 2 is not in a world of 2"),
        ({"RANK": "-1"}, "RANK = -1 is not in a world of 2"),
        ({"WORLD_SIZE": "0"}, "not in a world of 0"),
    ],
)
def test_an_unusable_environment_is_named(
    changed: dict[str, str | None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in (ENVIRONMENT | changed).items():
        if value is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, value)
    with pytest.raises(CommError, match=named) as caught:
        world_of_environment(CommConfig())
    assert caught.value.kind is ErrorKind.CONFIG


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(CommError, match=r"not initialised.*init_process_group"):
        world_of_group(CommConfig(), None)


class LaunchedBackend(LocalBackend):
    """A backend whose own launcher started one job, or none."""

    def __init__(self, job: World | None) -> None:
        super().__init__(Hub(2), WAITED)
        self._job = job

    def job(self, connect_timeout: float) -> World | None:
        return self._job


def test_the_job_of_the_backend_counts_before_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key, value in ENVIRONMENT.items():
        monkeypatch.setenv(key, value)
    store: Any = dist.HashStore()
    backend = LaunchedBackend(World(1, 3, store, 5.0))
    first, again, other = (
        world_of_job(CommConfig(name=name, connect_timeout=7.0), backend)
        for name in ("x", "x", "y")
    )
    assert (first.rank, first.size, first.connect_timeout) == (1, 3, 7.0)
    first.store.set("key", b"first")
    assert not again.store.check(["key"])
    assert not other.store.check(["key"])


def test_the_environment_counts_where_the_backend_has_no_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(CommError, match=r"RANK.* not set"):
        world_of_job(CommConfig(), LaunchedBackend(None))
    with pytest.raises(CommError, match=r"RANK.* not set"):
        world_of_job(CommConfig(), LocalBackend(Hub(2), WAITED))


def test_torch_distributed_counts_before_the_job_of_the_backend() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = world_of_job(CommConfig(), LaunchedBackend(World(1, 3, MemoryStore(), 5.0)))
        assert (world.rank, world.size) == (0, 1)
    finally:
        dist.destroy_process_group()
